"""Token truth and intervals against the masks' definitions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.masks.truth import (
    cells_rule,
    dense,
    random_mask,
    truth_of,
    truth_of_intervals,
)
from ultraattn import masks
from ultraattn.masks import Lengths

QUICK = settings(deadline=None, derandomize=True, max_examples=80)


def no(_i, _j):
    return False


def same(i, j):
    return i == j


CELL_MASKS = [
    (masks.strided(), 16, lambda i, j: i % 4 == j % 4 and abs(i // 4 - j // 4) < 3, no),
    (masks.strided(9, 2, 2), 9, lambda i, j: i % 2 == j % 2 and abs(i // 2 - j // 2) < 2, no),
    (masks.global_local(), 16, lambda i, j: i == 0 or j == 0 or i == j, no),
    (masks.global_local(7, 2, 3), 7, lambda i, j: min(i, j) < 2 or abs(i - j) < 3, no),
    (masks.star(), 4, lambda i, j: j == 0 and i > 0, same),
    (masks.streaming(), 8, lambda i, j: i > j and (j == 0 or j in (i - 1, i - 2)), same),
    (masks.streaming(6, 2, 2), 6, lambda i, j: i > j and (j < 2 or j == i - 1), same),
    (
        masks.from_blocks([["empty", "causal", "full"], [1, 0, 2], [0, 1, 0]]),
        3,
        lambda i, j: (i, j) in {(0, 2), (1, 0), (2, 1)},
        lambda i, j: (i, j) in {(0, 1), (1, 2)},
    ),
]


@pytest.mark.parametrize("length", [1, 7, 16, 37, 64])
@pytest.mark.parametrize(("mask", "cells", "full", "causal"), CELL_MASKS, ids=str)
def test_cell_masks_show_what_their_table_says(mask, cells, full, causal, length):
    lengths = Lengths(length, length)
    expected = dense(cells_rule(length, cells, full, causal), lengths)
    assert np.array_equal(truth_of(mask, lengths), expected)
    assert np.array_equal(truth_of_intervals(mask, lengths), expected)


@pytest.mark.parametrize(("q", "kv"), [(1, 1), (7, 7), (12, 30), (30, 12), (1, 9), (9, 1)])
@pytest.mark.parametrize(
    ("mask", "rule"),
    [
        (masks.full(), lambda behind: True),
        (masks.causal(), lambda behind: behind >= 0),
        (masks.sliding_window(1), lambda behind: behind == 0),
        (masks.sliding_window(4), lambda behind: 0 <= behind <= 3),
        (masks.sliding_window(99), lambda behind: 0 <= behind <= 98),
    ],
    ids=str,
)
def test_positional_masks_are_aligned_to_the_end(mask, rule, q, kv):
    lengths = Lengths(q, kv)
    expected = dense(lambda i, j: rule((i + kv - q) - j), lengths)
    assert np.array_equal(truth_of(mask, lengths), expected)
    assert np.array_equal(truth_of_intervals(mask, lengths), expected)


@pytest.mark.parametrize("causal", [True, False])
def test_documents_do_not_see_past_their_borders(causal):
    owner = [0] * 5 + [2] * 1 + [3] * 9
    lengths = Lengths(15, 15)
    expected = dense(lambda q, k: owner[q] == owner[k] and (k <= q or not causal), lengths)
    mask = masks.document([5, 0, 1, 9], causal=causal)
    assert np.array_equal(truth_of(mask, lengths), expected)
    assert np.array_equal(truth_of_intervals(mask, lengths), expected)


def test_ranges_are_a_union_with_their_diagonals_at_the_right_corners():
    mask = masks.from_ranges(
        [(0, 4), (2, 9), (3, 10)], [(0, 3), (1, 5), (6, 12)], ["full", "causal", "inverse_causal"]
    )

    def rule(q, k):
        return (
            (q < 4 and k < 3)
            or (2 <= q < 9 and 1 <= k < 5 and (k - 5) <= (q - 9))
            or (3 <= q < 10 and 6 <= k < 12 and (k - 6) >= (q - 3))
        )

    lengths = Lengths(11, 13)
    expected = dense(rule, lengths)
    assert np.array_equal(truth_of(mask, lengths), expected)
    assert np.array_equal(truth_of_intervals(mask, lengths), expected)


def test_rectangular_tables_take_any_lengths():
    table = [[1, 0, 1], [0, 1, 0]]
    lengths = Lengths(5, 10)
    expected = dense(lambda q, k: table[q * 2 // 5][k * 3 // 10], lengths)
    mask = masks.from_blocks(table)
    assert np.array_equal(truth_of(mask, lengths), expected)
    assert np.array_equal(truth_of_intervals(mask, lengths), expected)


@QUICK
@given(st.integers(0, 10**9), st.integers(1, 40), st.integers(1, 40), st.booleans())
def test_intervals_are_sorted_disjoint_and_say_what_token_truth_says(seed, q, kv, equal):
    lengths = Lengths(q, q if equal else kv)
    mask = random_mask(np.random.default_rng(seed), lengths)
    starts, stops = mask.intervals(np.arange(lengths.q), lengths)
    assert starts.shape == stops.shape
    assert starts.dtype == stops.dtype == np.int64
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        held = [a < b for a, b in zip(start, stop, strict=True)]
        assert held == sorted(held, reverse=True)
        assert all(a == b for a, b, h in zip(start, stop, held, strict=True) if not h)
        count = sum(held)
        assert all(b < a for b, a in zip(stop[: count - 1], start[1:count], strict=True))
    assert np.array_equal(truth_of_intervals(mask, lengths), truth_of(mask, lengths))


@QUICK
@given(st.integers(0, 10**9), st.integers(1, 30))
def test_and_or_are_those_of_token_truth(seed, length):
    lengths = Lengths(length, length)
    rng = np.random.default_rng(seed)
    left, right = (random_mask(rng, lengths, depth=1) for _ in range(2))
    a, b = truth_of(left, lengths), truth_of(right, lengths)
    assert np.array_equal(truth_of_intervals(left & right, lengths), a & b)
    assert np.array_equal(truth_of_intervals(left | right, lengths), a | b)


def test_intervals_of_chosen_rows_in_any_order():
    starts, stops = masks.sliding_window(3).intervals([9, 0, 4], Lengths(10, 10))
    assert starts.tolist() == [[7], [0], [2]]
    assert stops.tolist() == [[10], [1], [5]]


def test_a_sequence_without_tokens():
    lengths = Lengths(0, 0)
    starts, _ = masks.causal().intervals([], lengths)
    assert starts.shape[0] == 0
    assert truth_of(masks.star(), lengths).shape == (0, 0)
