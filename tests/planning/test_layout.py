"""Layouts own every token once, in the order that each is defined by."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ultraattn as ua
from ultraattn.chunks import Chunk
from ultraattn.planning.layout import (
    LayoutName,
    contiguous,
    explicit,
    layout_by_name,
    remapped,
    striped,
    zigzag,
)
from ultraattn.plans import Layout

RULE = settings(deadline=None, derandomize=True, max_examples=80)
ORDER = ua.masks.strided().cell_order()
NAMES = [name for name in LayoutName if name is not LayoutName.AUTO]


def tokens(layout: Layout) -> list[list[int]]:
    return [layout.positions(rank).tolist() for rank in range(layout.ranks)]


def least_chunks(name: str, ranks: int) -> int:
    return {"zigzag": 2 * ranks, "remapped": 16}.get(name, ranks)


@RULE
@given(
    st.sampled_from(NAMES),
    st.one_of(st.integers(0, 400), st.just(57_826)),
    st.integers(1, 9),
    st.integers(1, 3),
    st.sampled_from([1, 16]),
)
def test_every_token_has_one_owner(
    name: str, length: int, ranks: int, factor: int, align: int
) -> None:
    chunks = least_chunks(name, ranks) * factor
    layout = layout_by_name(name, length, ranks, order=ORDER, chunks=chunks, align=align)
    held = np.concatenate([layout.positions(rank) for rank in range(ranks)])
    assert np.array_equal(np.sort(held), np.arange(length))
    assert [layout.local_tokens(rank) for rank in range(ranks)] == [len(t) for t in tokens(layout)]
    for chunk, owner in enumerate(layout.owners):
        start = layout.offsets[chunk]
        mine = layout.positions(owner)[start : start + len(layout.chunks[chunk])]
        assert mine.tolist() == layout.chunks[chunk].tokens().tolist()


@RULE
@given(st.sampled_from(["contiguous", "striped"]), st.integers(0, 400), st.integers(1, 9))
def test_tokens_are_level_over_ranks(name: str, length: int, ranks: int) -> None:
    layout = layout_by_name(name, length, ranks, order=None)
    counts = [layout.local_tokens(rank) for rank in range(ranks)]
    assert max(counts) - min(counts) <= 1


def test_contiguous_gives_chunk_i_to_rank_floor_i_n_over_p() -> None:
    layout = contiguous(70, 3, chunks=7)
    assert layout.owners == (0, 0, 0, 1, 1, 2, 2)
    assert tokens(contiguous(7, 2)) == [[0, 1, 2], [3, 4, 5, 6]]


def test_zigzag_mirrors_pieces() -> None:
    layout = zigzag(24, 3)
    assert layout.owners == (0, 1, 2, 2, 1, 0)
    assert tokens(layout)[0] == [0, 1, 2, 3, 20, 21, 22, 23]
    assert zigzag(24, 3, chunks=12).owners == (0, 0, 1, 1, 2, 2, 2, 2, 1, 1, 0, 0)
    assert tokens(zigzag(24, 3, chunks=12)) == tokens(layout)


def test_zigzag_levels_causal_work() -> None:
    mask = ua.masks.causal()
    plans = {
        name: ua.plan(mask, seqlen=96, heads=1, head_dim=4, ranks=4, layout=name, strategy="rows")
        for name in ("contiguous", "zigzag")
    }
    assert plans["contiguous"].forward_account.load_over_mean > 1.7
    assert plans["zigzag"].forward_account.load_over_mean == 1.0


def test_stripes_are_of_single_tokens() -> None:
    assert tokens(striped(11, 3)) == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8]]
    cut = striped(11, 3, chunks=6)
    assert tokens(cut) == tokens(striped(11, 3))
    assert [chunk.tokens().tolist() for chunk in cut.chunks][:2] == [[0, 3], [6, 9]]


@pytest.mark.parametrize("name", list(NAMES))
def test_fewer_tokens_than_ranks_leaves_ranks_empty(name: str) -> None:
    layout = layout_by_name(name, 3, 8, order=ORDER)
    counts = [layout.local_tokens(rank) for rank in range(8)]
    assert sum(counts) == 3
    assert 0 in counts


def test_strided_is_remapped_to_squares_on_the_diagonal() -> None:
    """Design: chunk i to group i mod 4 gives four squares, each full but for two far corners."""
    mask = ua.masks.strided()
    layout = remapped(64, 4, ORDER or ())
    assert [chunk.start // 4 for chunk in layout.chunks] == [
        i for group in range(4) for i in range(group, 16, 4)
    ]
    weights = mask.grid(layout.chunks, layout.chunks).weights[0, 0]
    square = np.full((4, 4), 16)
    square[0, 3] = square[3, 0] = 0
    assert np.array_equal(weights, np.kron(np.eye(4, dtype=int), square))


def test_remapped_cells_may_be_cut_finer() -> None:
    fine = remapped(64, 4, ORDER or (), chunks=32)
    assert tokens(fine) == tokens(remapped(64, 4, ORDER or ()))
    assert len(remapped(64, 20, ORDER or ()).chunks) == 32


def test_a_mask_without_an_order_of_its_own_is_contiguous() -> None:
    layout = layout_by_name("remapped", 40, 4, order=None)
    assert tokens(layout) == tokens(contiguous(40, 4))


def test_explicit_chunks_in_any_order() -> None:
    layout = explicit(9, 2, [Chunk(6, 9), Chunk(0, 6, 2), Chunk(1, 6, 2)], [1, 1, 0])
    assert tokens(layout) == [[1, 3, 5], [6, 7, 8, 0, 2, 4]]


@pytest.mark.parametrize(
    ("chunks", "owners", "words"),
    [
        ([Chunk(0, 4), Chunk(5, 9)], [0, 1], "gap at token 4"),
        ([Chunk(0, 5), Chunk(4, 9)], [0, 1], "overlap at token 4"),
        ([Chunk(0, 9)], [0, 1], "2 owners for 1 chunks"),
        ([Chunk(0, 9)], [2], "owner 2 among 2 ranks"),
        ([Chunk(0, 9)], [-1], "owner -1 among 2 ranks"),
    ],
)
def test_faults_of_explicit_chunks_are_refused(
    chunks: list[Chunk], owners: list[int], words: str
) -> None:
    with pytest.raises(ua.InputError, match=words):
        explicit(9, 2, chunks, owners)


@pytest.mark.parametrize(
    ("name", "chunks", "words"),
    [
        ("spiral", None, "expected one of contiguous, zigzag, striped, remapped, auto"),
        ("zigzag", 6, "pass a multiple of 8 chunks"),
        ("striped", 6, "pass a multiple of 4 chunks"),
        ("remapped", 20, "pass a multiple of 16 chunks"),
        ("contiguous", 0, "chunks 0: expected at least 1"),
    ],
)
def test_layouts_that_cannot_be_made_are_refused(name: str, chunks: int | None, words: str) -> None:
    with pytest.raises(ua.InputError, match=words):
        layout_by_name(name, 100, 4, order=ORDER, chunks=chunks)
