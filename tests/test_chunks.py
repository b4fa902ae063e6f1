"""Edges come from one formula; coarse edges are fine edges; chunks hold every token once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ultraattn as ua
from ultraattn.chunks import Chunk, Chunks, edges, split

RULE = settings(deadline=None, derandomize=True, max_examples=60)


@RULE
@given(st.integers(0, 5000), st.integers(1, 40), st.sampled_from([1, 7, 128]))
def test_edges_follow_the_formula(length: int, parts: int, align: int) -> None:
    expected = [min(length, align * (i * -(-length // align) // parts)) for i in range(parts + 1)]
    assert edges(length, parts, align).tolist() == expected


@RULE
@given(st.integers(0, 5000), st.integers(1, 20), st.integers(1, 6), st.sampled_from([1, 128]))
def test_coarse_edges_are_a_subset_of_fine_ones(
    length: int, parts: int, factor: int, align: int
) -> None:
    fine = edges(length, parts * factor, align)
    assert edges(length, parts, align).tolist() == fine[::factor].tolist()


@RULE
@given(st.integers(0, 5000), st.integers(1, 40), st.sampled_from([1, 128]))
def test_split_is_level_and_loses_no_token(length: int, parts: int, align: int) -> None:
    chunks = split(length, parts, align)
    assert [token for chunk in chunks for token in chunk.tokens()] == list(range(length))
    sizes = chunks.sizes()
    whole = sizes[:-1] if length % align else sizes
    if len(whole):
        assert whole.max() - whole.min() <= align
    assert chunks.contiguous
    assert Chunks.make(length, list(chunks)) == chunks


def test_chunk_of_a_stripe() -> None:
    chunk = Chunk(1, 8, 3)
    assert chunk.tokens().tolist() == [1, 4, 7]
    assert len(chunk) == 3
    assert len(Chunk(5, 5)) == 0


@pytest.mark.parametrize("numbers", [(-1, 3, 1), (4, 3, 1), (0, 3, 0), (0, 3, -1)])
def test_impossible_chunks_are_refused(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(ua.InputError, match="expected 0 <= start <= stop and step >= 1"):
        Chunk(*numbers)


def test_stripes_make_a_sequence_that_is_not_contiguous() -> None:
    chunks = Chunks.make(7, [Chunk(0, 7, 2), Chunk(1, 7, 2)])
    assert not chunks.contiguous
    assert chunks.sizes().tolist() == [4, 3]
    assert not Chunks.make(4, [Chunk(2, 4), Chunk(0, 2)]).contiguous
    assert Chunks.make(4, [Chunk(0, 2), Chunk(1, 1, 5), Chunk(2, 4)]).contiguous


@pytest.mark.parametrize(
    ("chunks", "words"),
    [
        ([Chunk(0, 4), Chunk(5, 9)], r"leave a gap at token 4 \(1 tokens"),
        ([Chunk(0, 4)], r"leave a gap at token 4 \(5 tokens"),
        ([], r"leave a gap at token 0 \(9 tokens"),
        ([Chunk(0, 6), Chunk(4, 9)], r"overlap at token 4 \(2 tokens"),
        ([Chunk(0, 9), Chunk(0, 9)], r"overlap at token 0 \(9 tokens"),
        ([Chunk(0, 9, 2), Chunk(1, 9, 3)], r"leave a gap at token 3"),
        ([Chunk(0, 9), Chunk(9, 10)], r"chunk 1 \(9, 10, 1\) reaches past the sequence of 9"),
    ],
)
def test_chunks_that_do_not_hold_every_token_once_are_refused(
    chunks: list[Chunk], words: str
) -> None:
    with pytest.raises(ua.InputError, match=words):
        Chunks.make(9, chunks)


@pytest.mark.parametrize("given_", [(-1, 2, 1), (4, 0, 1), (4, 2, 0)])
def test_impossible_edges_are_refused(given_: tuple[int, int, int]) -> None:
    with pytest.raises(ua.InputError, match="expected length >= 0"):
        edges(*given_)
