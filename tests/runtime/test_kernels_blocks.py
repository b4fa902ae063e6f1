from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ultraattn.masks.grid import OPEN_HI, OPEN_LO, BlockKind
from ultraattn.runtime.kernels import Piece
from ultraattn.runtime.kernels.blocks import rectangles, visible


def band(cols, lo, hi):
    return Piece(
        torch.zeros(1, 1, cols, 1), torch.zeros(1, 1, cols, 1), (0,), BlockKind.BAND, lo, hi
    )


@settings(deadline=None, derandomize=True, max_examples=100)
@given(
    rows=st.integers(0, 12),
    cols=st.integers(0, 12),
    lo=st.one_of(st.just(OPEN_LO), st.integers(-14, 14)),
    hi=st.one_of(st.just(OPEN_HI), st.integers(-14, 14)),
    step=st.integers(1, 13),
)
def test_rectangles_hold_every_pair_of_a_band_once_and_no_idle_row_or_key(rows, cols, lo, hi, step):
    piece = band(cols, lo, hi)
    distance = torch.arange(rows)[:, None] - torch.arange(cols)
    want = ((distance >= lo) & (distance <= hi)).long()
    got = torch.zeros(rows, cols, dtype=torch.long)
    for part in rectangles(piece, rows, step, step):
        seen = visible(piece, part)
        inside = torch.ones(1, part.rows, part.cols, dtype=torch.bool) if seen is None else seen
        assert inside[0].any(dim=1).all()
        assert inside[0].any(dim=0).all()
        assert part.full == bool(inside.all())
        if part.causal:
            assert torch.equal(inside[0], torch.ones_like(inside[0]).tril())
        got[part.top : part.bottom, part.left : part.right] += inside[0]
    assert torch.equal(got, want)


def test_a_window_costs_its_width_and_not_the_whole_square():
    parts = list(rectangles(band(4096, 0, 255), 4096, 128, 128))
    assert sum(part.rows * part.cols for part in parts) <= 4096 * (256 + 128)
