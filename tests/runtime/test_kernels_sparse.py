"""The sparse kernel, interpreted on the CPU (TRITON_INTERPRET=1), against the reference."""

from __future__ import annotations

import os

import pytest
import torch

from ultraattn.masks.grid import OPEN_HI, OPEN_LO, BlockKind
from ultraattn.runtime.dense import dense_attention, dense_backward
from ultraattn.runtime.kernels import Piece, reference, sparse
from ultraattn.runtime.kernels.lists import Cell

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


def laid(x, order):
    """A copy of (batch, heads, rows, dim), tokens first or heads first in memory."""
    return x.contiguous() if order == "heads" else x.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("orders", [("tokens", "tokens"), ("tokens", "heads")])
def test_chunks_in_several_buffers_are_one_launch(orders, monkeypatch):
    monkeypatch.setattr(sparse, "sizes", lambda *_: sparse.Sizes(32, 32, 4, 2))
    heads, kv_heads, dim, rows, cols = 4, 2, 16, (40, 30), (50, 20)
    q, dout = (torch.randn(2, heads, sum(rows), dim) for _ in range(2))
    k, v = (torch.randn(2, kv_heads, sum(cols), dim) for _ in range(2))
    seen = torch.zeros(heads, sum(rows), sum(cols), dtype=torch.bool)
    seen[:, :40, :50] = torch.arange(40)[:, None] + 5 >= torch.arange(50)
    seen[2:, 40:, 50:] = True
    seen[:2, :40, 50:] = True
    cells = (
        Cell(0, 0, (0, 4), BlockKind.BAND, -5, OPEN_HI),
        Cell(1, 1, (2, 4), BlockKind.FULL),
        Cell(0, 1, (0, 2), BlockKind.FULL),
    )
    blocks = sparse.BlockSet(
        tuple(sparse.Extent(n, (0, heads)) for n in rows),
        tuple(sparse.Extent(n, (0, kv_heads)) for n in cols),
        cells, heads // kv_heads, q.device,
    )  # fmt: skip

    def cut(x, sizes):
        return [laid(part, order) for part, order in zip(x.split(sizes, 2), orders, strict=True)]

    pairs = list(zip(cut(k, cols), cut(v, cols), strict=True))
    # Results of one chunk in two places, one of them in the middle of a larger tensor.
    outs = [torch.full((2, 2 * n, heads, dim), torch.nan).transpose(1, 2) for n in rows]
    lses = [torch.full((2, heads, n), torch.nan) for n in rows]
    places = [
        sparse.Place(i, span, (outs[i][:, slice(*span), :n], lses[i][:, slice(*span)]))
        for i, n in enumerate(rows)
        for span in ((0, 1), (1, 4))
    ]
    scale = 0.3
    sparse.forward_set(blocks, cut(q, rows), pairs, places, scale)
    out = torch.cat([x[:, :, :n] for x, n in zip(outs, rows, strict=True)], 2)
    lse = torch.cat(lses, 2)
    wide = [x.double() for x in (q, k, v)]
    true_out, true_lse = dense_attention(*wide, seen, scale)
    assert torch.allclose(out.double(), true_out, atol=1e-5)
    assert torch.equal(lse.isinf(), true_lse.isinf())
    delta = (dout * out).sum(-1)
    dqs = [torch.full((2, heads, n, dim), torch.nan) for n in rows]
    dks, dvs = ([torch.full((2, kv_heads, n, dim), torch.nan) for n in cols] for _ in range(2))
    sparse.backward_set(
        blocks, cut(dout, rows), cut(q, rows), lse.split(rows, 2), delta.split(rows, 2), pairs,
        [sparse.Place(i, (0, heads), (x,)) for i, x in enumerate(dqs)],
        [sparse.Place(i, (0, kv_heads), x) for i, x in enumerate(zip(dks, dvs, strict=True))],
        scale,
    )  # fmt: skip
    true = dense_backward(dout.double(), *wide, seen, scale)
    for got, wanted in zip((dqs, dks, dvs), true, strict=True):
        assert torch.allclose(torch.cat(got, 2).double(), wanted, atol=2e-5)
