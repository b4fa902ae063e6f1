"""Grids against dense truth, over any chunks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.masks.truth import assert_grid_shows, random_chunks, random_mask, truth_of
from ultraattn import masks
from ultraattn.chunks import Chunk, Chunks, edges, split
from ultraattn.masks import OPEN_HI, OPEN_LO, BlockKind, Lengths


@settings(deadline=None, derandomize=True, max_examples=300)
@given(st.integers(0, 10**9), st.integers(1, 40), st.integers(1, 40), st.booleans())
def test_any_mask_over_any_chunks(seed, q, kv, equal):
    lengths = Lengths(q, q if equal else kv)
    rng = np.random.default_rng(seed)
    mask = random_mask(rng, lengths)
    grid = mask.grid(random_chunks(rng, lengths.q), random_chunks(rng, lengths.kv))
    assert grid.kinds.shape[:2] == (1, 1)
    assert_grid_shows(grid, truth_of(mask, lengths))


@settings(deadline=None, derandomize=True, max_examples=25)
@given(st.integers(0, 10**9), st.integers(1, 24), st.integers(1, 24))
def test_token_by_token_grids_equal_the_closed_form(seed, q, kv):
    rng = np.random.default_rng(seed)
    lengths = Lengths(q, kv)
    mask = random_mask(rng, lengths)
    q_chunks, kv_chunks = random_chunks(rng, q), random_chunks(rng, kv)

    def mask_mod(_b, _h, q_index, kv_index):
        import torch

        return torch.as_tensor(truth_of(mask, lengths))[q_index, kv_index]

    by_token = masks.from_mask_mod(mask_mod).grid(q_chunks, kv_chunks)
    assert by_token == mask.grid(q_chunks, kv_chunks)
    assert by_token.digest() == mask.grid(q_chunks, kv_chunks).digest()


def test_stripes_whose_steps_do_not_divide_one_another():
    q_chunks = Chunks.make(30, [Chunk(r, 30, 4) for r in range(4)])
    kv_chunks = Chunks.make(30, [Chunk(r, 30, 6) for r in (3, 1, 0, 5, 4, 2)])
    for mask in (masks.causal(), masks.sliding_window(7), masks.streaming()):
        for a, b in ((q_chunks, kv_chunks), (kv_chunks, q_chunks), (split(30, 3), q_chunks)):
            assert_grid_shows(mask.grid(a, b), truth_of(mask, Lengths(30, 30)))


def test_the_square_on_the_diagonal_of_a_causal_mask_is_open_above():
    grid = masks.causal().grid(split(12, 3), split(12, 3))
    assert [[grid.kind(i, j).value for j in range(3)] for i in range(3)] == [
        ["band", "empty", "empty"],
        ["full", "band", "empty"],
        ["full", "full", "band"],
    ]
    assert (grid.lo[0, 0, 1, 1], grid.hi[0, 0, 1, 1]) == (0, OPEN_HI)


def test_stripes_of_a_causal_mask_are_causal_or_strictly_causal():
    stripes = Chunks.make(12, [Chunk(r, 12, 3) for r in range(3)])
    grid = masks.causal().grid(stripes, stripes)
    assert (grid.kinds == BlockKind.BAND.code).all()
    assert grid.lo[0, 0].tolist() == [[0, 1, 1], [0, 0, 1], [0, 0, 0]]
    assert (grid.hi == OPEN_HI).all()


def test_an_inverse_causal_square_is_open_below():
    mask = masks.from_ranges([(0, 5)], [(0, 5)], "inverse_causal")
    grid = mask.grid([0, 5], [0, 5])
    assert (grid.lo[0, 0, 0, 0], grid.hi[0, 0, 0, 0]) == (OPEN_LO, 0)


def test_limits_are_zero_where_a_block_is_no_band():
    grid = masks.star().grid(split(64, 8), split(64, 8))
    assert (grid.lo[grid.kinds != BlockKind.BAND.code] == 0).all()
    assert (grid.hi[grid.kinds != BlockKind.BAND.code] == 0).all()


def test_fewer_tokens_than_chunks_leave_empty_blocks():
    grid = masks.causal().grid(split(3, 8), split(3, 8))
    assert int(grid.weights.sum()) == 6
    assert_grid_shows(grid, truth_of(masks.causal(), Lengths(3, 3)))


def test_edges_stand_for_contiguous_chunks():
    mask = masks.star()
    assert mask.grid(edges(50, 4), edges(50, 3)) == mask.grid(split(50, 4), split(50, 3))


MILLION = 1 << 20


@pytest.mark.parametrize(
    ("mask", "pairs"),
    [
        (masks.causal(), MILLION * (MILLION + 1) // 2),
        (masks.sliding_window(4096), 4096 * MILLION - 4096 * 4095 // 2),
        (masks.strided(), 56 * (MILLION // 16) ** 2),
        (masks.document([1024] * 1024), 1024 * 1024 * 1025 // 2),
        (
            masks.document([1024] * 1024) & masks.sliding_window(100),
            1024 * (100 * 1024 - 100 * 99 // 2),
        ),
        (
            masks.document([1024] * 1024) | masks.sliding_window(100),
            1024 * 1024 * 1025 // 2 + 1023 * (99 * 100 // 2),
        ),
    ],
    ids=str,
)
def test_a_million_tokens_over_256_chunks_are_counted_exactly(mask, pairs):
    grid = mask.grid(split(MILLION, 256), split(MILLION, 256))
    assert int(grid.weights.sum()) == pairs


def test_a_million_tokens_in_stripes_are_counted_exactly():
    stripes = Chunks(MILLION, tuple(Chunk(r, MILLION, 256) for r in range(256)))
    grid = masks.causal().grid(stripes, stripes)
    assert int(grid.weights.sum()) == MILLION * (MILLION + 1) // 2
    assert (grid.kinds == BlockKind.BAND.code).all()


@pytest.mark.parametrize("striped_queries", [True, False])
def test_a_million_tokens_of_documents_in_stripes_are_counted_exactly(striped_queries):
    stripes = Chunks(MILLION, tuple(Chunk(r, MILLION, 256) for r in range(256)))
    mask = masks.document([1024] * 1024)
    grid = mask.grid(stripes if striped_queries else split(MILLION, 256), stripes)
    assert int(grid.weights.sum()) == 1024 * 1024 * 1025 // 2


def test_a_grid_compares_by_value():
    chunks = split(20, 4)
    assert masks.causal().grid(chunks, chunks) == masks.causal().grid(chunks, chunks)
    assert masks.causal().grid(chunks, chunks) != masks.full().grid(chunks, chunks)
    assert (
        masks.causal().grid(chunks, chunks).digest() != masks.full().grid(chunks, chunks).digest()
    )
