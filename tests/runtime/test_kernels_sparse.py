"""The sparse kernel, interpreted on the CPU (TRITON_INTERPRET=1), against the reference."""

from __future__ import annotations

import os

import pytest
import torch

from ultraattn.masks.grid import OPEN_HI, OPEN_LO, BlockKind
from ultraattn.runtime.kernels import Piece, reference, sparse

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton and TRITON_INTERPRET=1"
)
SHAPES = {
    "one row": (BlockKind.FULL, 1, 70, OPEN_LO, OPEN_HI),
    "end-aligned": (BlockKind.BAND, 40, 70, -30, OPEN_HI),
    "window": (BlockKind.BAND, 70, 70, -20, 40),
    "partial by head": (BlockKind.PARTIAL, 50, 70, OPEN_LO, OPEN_HI),
}


def draw(*shape):
    return torch.randn(shape).transpose(1, 2)


@pytest.mark.parametrize("scale", [0.3, -0.2])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_equals_the_reference(shape, scale, monkeypatch):
    monkeypatch.setattr(sparse, "sizes", lambda *_: sparse.Sizes(32, 32, 4, 2))
    kind, rows, cols, lo, hi = SHAPES[shape]
    heads, kv_heads, dim, dim_v = (4, 2, 16, 24)
    q, dout = draw(2, rows, heads, dim), draw(2, rows, heads, dim_v)
    k, v = draw(2, cols, kv_heads, dim), draw(2, cols, kv_heads, dim_v)
    mask = None
    if kind is BlockKind.PARTIAL:
        mask = torch.rand(heads, rows, cols) > 0.6
        mask[:, 7], mask[:, :32, :32] = False, True
    index = tuple(head * kv_heads // heads for head in range(heads))
    piece = Piece(k, v, index, kind, lo, hi, mask)
    wide = Piece(k.double(), v.double(), index, kind, lo, hi, mask)
    out, lse = sparse.forward(q, piece, scale)
    true_out, true_lse = reference.forward(q.double(), wide, scale)
    assert torch.equal(lse.isinf(), true_lse.isinf())
    assert torch.allclose(lse.double(), true_lse, atol=1e-5)
    assert torch.allclose(out.double(), true_out, atol=1e-5)
    glob = torch.logaddexp(true_lse.float(), torch.randn(true_lse.shape))
    glob[:, :, rows // 3] = float("-inf")
    delta = torch.randn(glob.shape)
    got = sparse.backward(dout, q, glob, delta, piece, scale)
    true = reference.backward(dout.double(), q.double(), glob.double(), delta.double(), wide, scale)
    for some, wanted in zip(got, true, strict=True):
        assert torch.allclose(some.double(), wanted, atol=2e-5)
