"""Weights in the paper's units, and the masks' own order of their cells."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from ultraattn import masks
from ultraattn.errors import InputError


def total(mask, parts):
    numerators, denominator = mask.nominal(parts, parts)
    assert numerators.dtype == np.int64
    return Fraction(int(numerators.sum()), denominator)


@pytest.mark.parametrize(
    ("mask", "cells", "weight"),
    [
        (masks.strided(), 16, 56),
        (masks.global_local(), 16, 46),
        (masks.star(), 4, 5),
        (masks.streaming(), 8, 22),
        (masks.full(), 1, 1),
        (masks.causal(), 1, Fraction(1, 2)),
    ],
    ids=str,
)
def test_the_papers_weights_at_the_masks_own_grid_and_beside_it(mask, cells, weight):
    assert mask.cells == cells
    assert total(mask, cells) == weight
    for parts in (1, 3, 5, 2 * cells, 24):
        assert total(mask, parts) / parts**2 == Fraction(weight) / cells**2


def test_causal_weights_by_degree():
    assert [total(masks.causal(), parts) for parts in (2, 3, 4, 5)] == [
        2,
        Fraction(9, 2),
        8,
        Fraction(25, 2),
    ]


def test_star_over_eight_ranks_of_rows_is_forty_percent_over():
    numerators, denominator = masks.star().nominal(8, 4)
    # A block is half a row of cells high: its area is half a cell.
    in_cells = [Fraction(int(row.sum()), 2 * denominator) for row in numerators]
    assert in_cells[-1] == Fraction(875, 1000)
    assert sum(in_cells) / 8 == Fraction(625, 1000)
    assert in_cells[-1] / (sum(in_cells) / 8) == Fraction(14, 10)


def test_a_blocks_weight_is_the_share_of_its_pairs_at_fine_lengths():
    mask = masks.streaming()
    numerators, denominator = mask.nominal(12, 6)
    lengths = 24 * 40
    grid = mask.grid(np.arange(13) * (lengths // 12), np.arange(7) * (lengths // 6))
    share = grid.weights[0, 0] / ((lengths // 12) * (lengths // 6))
    # The diagonal's own tokens are seen whole, not half: one half of a key a row at most.
    assert np.abs(share - numerators / denominator).max() <= 0.5 / (lengths // 6) + 1e-12


def test_strided_remapped_is_four_squares_but_for_their_far_corners():
    order = masks.strided().cell_order()
    assert order == (0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15)
    square = np.array([[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]])
    expected = np.kron(np.eye(4, dtype=int), square)
    table = masks.strided().cell_table()
    assert np.array_equal(table[np.ix_(order, order)], expected)
    numerators, denominator = masks.strided().nominal(16, 16, remapped=True)
    assert np.array_equal(numerators, expected * denominator)


def test_masks_without_an_order_of_their_own_are_the_same_remapped():
    for mask in (masks.causal(), masks.star(), masks.global_local()):
        assert mask.cell_order() is None
        plain, remapped = mask.nominal(8, 8), mask.nominal(8, 8, remapped=True)
        assert np.array_equal(plain[0], remapped[0])
        assert plain[1] == remapped[1]


def test_cell_tables_of_rectangular_masks():
    mask = masks.from_blocks([[1, 0, 1], [0, 1, 0]])
    assert mask.cells is None
    numerators, denominator = mask.nominal(2, 3)
    assert (numerators / denominator).tolist() == [[1, 0, 1], [0, 1, 0]]


@pytest.mark.parametrize(
    "mask",
    [masks.sliding_window(8), masks.document([4]), masks.causal() & masks.sliding_window(8)],
    ids=str,
)
def test_masks_without_cells_have_no_paper_units(mask):
    assert mask.cells is None
    assert mask.cell_table() is None
    with pytest.raises(InputError, match="units"):
        mask.nominal(4, 4)


def test_parts_whose_multiple_is_out_of_reach_are_refused():
    with pytest.raises(InputError, match="common multiple"):
        masks.strided(grid=1009).nominal(65537, 65539)
