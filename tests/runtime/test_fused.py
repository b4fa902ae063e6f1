"""How pieces are cut for fused operators, checked against what an operator's window means."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ultraattn.masks.grid import OPEN_HI, OPEN_LO, BlockKind
from ultraattn.runtime.kernels import cudnn, flash2, fused
from ultraattn.runtime.kernels.base import Piece
from ultraattn.runtime.kernels.standin import nonzero_rows, stand_in


def flash_sees(part):
    """What FlashAttention-2 computes: windows count from the end, and reach as far as the keys."""
    causal, left, right = flash2.window(part)
    rows, cols = part.rows, part.cols
    right = 0 if causal else right
    left, right = (-1 if x >= cols else x for x in (left, right))
    if left < 0 <= right:
        left = cols
    if right < 0 <= left:
        right = cols
    end = torch.arange(rows)[:, None] + cols - rows
    keys = torch.arange(cols)
    everything = torch.ones(rows, cols, dtype=torch.bool)
    if left < 0 and right < 0:
        return everything
    return (keys >= end - left) & (keys <= end + right)


def cudnn_sees(part):
    """What cuDNN computes: everything, or causal from the start."""
    causal = torch.ones(part.rows, part.cols, dtype=torch.bool).tril()
    return torch.ones_like(causal) if part.full else causal


@settings(deadline=None, derandomize=True, max_examples=150)
@given(
    rows=st.integers(1, 12), cols=st.integers(1, 12),
    lo=st.one_of(st.just(OPEN_LO), st.integers(-14, 14)),
    hi=st.one_of(st.just(OPEN_HI), st.integers(-14, 14)),
)  # fmt: skip
def test_every_visible_pair_of_a_band_is_computed_once(rows, cols, lo, hi):
    keys = torch.zeros(1, 1, cols, 8)
    piece = Piece(keys, keys, (0,), BlockKind.BAND, lo, hi)
    distance = torch.arange(rows)[:, None] - torch.arange(cols)
    wanted = ((distance >= lo) & (distance <= hi)).int()
    operators = [(flash2.OPERATOR, flash_sees)]
    if fused.is_startable(piece, rows):
        operators.append((cudnn.OPERATOR, cudnn_sees))
    for operator, sees in operators:
        count = torch.zeros(rows, cols, dtype=torch.int32)
        for part in fused._parts(operator, piece, rows):
            count[part.top : part.bottom, part.left : part.right] += sees(part).int()
        assert torch.equal(count, wanted)


def test_the_stand_in_has_the_delta_it_was_made_for():
    generator = torch.Generator().manual_seed(0)
    dout = torch.randn(2, 3, 20, 16, generator=generator)
    delta = torch.randn(2, 3, 20, generator=generator)
    dout[:, :, 4], delta[:, :, 4] = 0.0, 0.0
    lse = delta.clone()
    lse[:, :, 9] = float("-inf")
    out, shifted = stand_in(dout, delta, lse)
    assert torch.allclose((out * dout).sum(-1), delta, atol=1e-5)
    assert bool((shifted[:, :, 9] == float("inf")).all())
    assert torch.equal(shifted[:, :, :9], lse[:, :, :9])


def test_a_row_without_a_gradient_of_o_can_carry_one_of_the_lse():
    dout = torch.zeros(1, 1, 3, 8, dtype=torch.bfloat16)
    dout[0, 0, 1] = 1.0
    dlse = torch.tensor([[[2.0, 2.0, 0.0]]])
    patched = nonzero_rows(dout, dlse)
    assert torch.equal(patched[0, 0, 1:], dout[0, 0, 1:])
    assert 0 < float(patched[0, 0, 0].float().norm()) < 1e-3
    out, _ = stand_in(patched, -dlse, dlse)
    delta = (out.float() * patched.float()).sum(-1)
    assert torch.allclose(delta, -dlse, rtol=1e-2)
