"""Lists of tiles hold every visible pair once, and mark as full what needs no mask."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ultraattn.errors import InputError
from ultraattn.masks.grid import OPEN_HI, OPEN_LO, BlockKind
from ultraattn.runtime.kernels.lists import HEADS_TOGETHER, Cell, Major, lists_of


def truth_of(table):
    """A `Truth` over a bool table (heads, rows, columns)."""

    def truth(head, first, last, by_minor):
        one = table[head if len(table) > 1 else 0]
        return one[:, first:last].T if by_minor else one[first:last]

    return truth


def dense(cell, rows, cols, head):
    """The visible pairs of a block, from its definition: (rows, columns)."""
    if cell.kind is BlockKind.PARTIAL:
        return cell.truth(head, 0, rows, False)
    distance = np.arange(rows)[:, None] - np.arange(cols)
    if cell.kind is BlockKind.FULL:
        return np.ones_like(distance, dtype=bool)
    return (distance >= cell.lo) & (distance <= cell.hi)


def counted(lists, majors, minors, major, minor, head, number, member=0):
    """How often a launch looks at each pair of a major and each minor chunk."""
    part = majors[number]
    found = [np.zeros((part.rows, cols), dtype=int) for cols in minors]
    seen_rows = np.zeros(part.rows, dtype=int)
    for record, one in lists.work:
        line = lists.records[record]
        if line[0] != number or one != head:
            continue
        top, rows = line[1], line[2]
        seen_rows[top : top + rows] += 1
        start, full, begin, partial = line[3 + 4 * member : 7 + 4 * member]
        for at in [*range(start, start + full), *range(begin, begin + partial)]:
            chunk, tile = lists.entries[at] >> 16, lists.entries[at] & 0xFFFF
            left = tile * minor
            if at < start + full and full and at >= start:
                assert left + minor <= minors[chunk]  # full tiles are loaded without a mask
                found[chunk][top : top + rows, left : left + minor] += 1
                continue
            words = lists.bits[lists.patterns[at]].view(np.uint32)
            bits = (words[:, :, None] >> np.arange(32, dtype=np.uint32)) & 1
            bits = bits.reshape(major, minor)
            wide = minors[chunk] - left
            assert not bits[:rows, wide:].any()
            some = found[chunk][top : top + rows, left : left + minor]
            some += bits[:rows, : some.shape[1]].astype(int)
    assert (seen_rows == 1).all()  # every row is written once
    return found


bands = st.tuples(st.integers(-40, 40), st.integers(-5, 60)).map(lambda x: (x[0], x[0] + x[1]))


@st.composite
def launches(draw):
    rows = draw(st.lists(st.integers(1, 70), min_size=1, max_size=3))
    cols = draw(st.lists(st.integers(1, 90), min_size=1, max_size=3))
    heads, group = draw(st.sampled_from([(1, 1), (2, 1), (4, 2)]))
    generator = np.random.default_rng(draw(st.integers(0, 99)))
    cells = []
    for i, r in enumerate(rows):
        for j, c in enumerate(cols):
            kind = draw(st.sampled_from(["none", "full", "band", "open", "partial", "by head"]))
            span = draw(st.sampled_from([(0, heads), (heads // 2, heads)]))
            if kind == "none":
                continue
            if kind == "full":
                cells.append(Cell(i, j, span, BlockKind.FULL))
            elif kind in ("band", "open"):
                lo, hi = draw(bands)
                if kind == "open":
                    lo, hi = draw(st.sampled_from([(OPEN_LO, hi), (lo, OPEN_HI)]))
                cells.append(Cell(i, j, span, BlockKind.BAND, lo, hi))
            else:
                table = generator.random((heads if kind == "by head" else 1, r, c)) > 0.5
                table[:, : r // 2, : c // 2] = draw(st.booleans())
                cells.append(
                    Cell(
                        i,
                        j,
                        span,
                        BlockKind.PARTIAL,
                        truth=truth_of(table),
                        by_head=kind == "by head",
                    )
                )
    return rows, cols, heads, group, cells


@settings(deadline=None, derandomize=True, max_examples=60)
@given(launches(), st.sampled_from([(16, 32), (32, 32), (32, 64)]))
def test_every_visible_pair_is_listed_once_by_rows(launch, tile):
    rows, cols, heads, _, cells = launch
    majors = [Major(i, r, (0, heads)) for i, r in enumerate(rows)]
    lists = lists_of(majors, cols, cells, *tile)
    for number in range(len(majors)):
        for head in range(heads):
            found = counted(lists, majors, cols, *tile, head, number)
            for j, c in enumerate(cols):
                wanted = np.zeros((rows[number], c), dtype=int)
                for cell in cells:
                    if (cell.major, cell.minor) == (number, j) and cell.heads[0] <= head:
                        wanted += dense(cell, rows[number], c, head)
                assert np.array_equal(found[j], wanted)


@settings(deadline=None, derandomize=True, max_examples=40)
@given(launches(), st.sampled_from([(16, 32), (32, 64)]))
def test_every_visible_pair_is_listed_once_by_keys_for_each_head_of_a_group(launch, tile):
    rows, cols, heads, group, cells = launch
    majors = [Major(j, c, (0, heads // group)) for j, c in enumerate(cols)]
    lists = lists_of(majors, rows, [cell.transposed() for cell in cells], *tile, group)
    for number in range(len(majors)):
        for head in range(heads):
            found = counted(lists, majors, rows, *tile, head // group, number, head % group)
            for i, r in enumerate(rows):
                wanted = np.zeros((r, cols[number]), dtype=int)
                for cell in cells:
                    if (cell.major, cell.minor) == (i, number) and cell.heads[0] <= head:
                        wanted += dense(cell, r, cols[number], head)
                assert np.array_equal(found[i], wanted.T)


def test_a_long_causal_block_has_two_patterns_and_half_of_its_tiles():
    tokens, tile = 16384, 128
    cell = Cell(0, 0, (0, 1), BlockKind.BAND, 0, OPEN_HI)
    lists = lists_of([Major(0, tokens, (0, 1))], [tokens], [cell], tile, tile // 2)
    tiles = tokens // tile
    assert len(lists.bits) == 2
    assert lists.partial == 2 * tiles
    assert lists.full == tiles * (tiles - 1)


def test_what_a_window_costs_follows_the_window_not_the_sequence():
    cell = Cell(0, 0, (0, 1), BlockKind.BAND, 0, 511)
    per_row = []
    for tokens in (4096, 65536):
        lists = lists_of([Major(0, tokens, (0, 1))], [tokens], [cell], 128, 64)
        per_row.append((lists.full + lists.partial) / tokens)
        assert len(lists.bits) <= 8
    assert per_row[1] == pytest.approx(per_row[0], rel=0.1)


def test_long_rows_start_first_among_heads_that_run_together():
    heads = 2 * HEADS_TOGETHER
    cell = Cell(0, 0, (0, heads), BlockKind.BAND, 0, OPEN_HI)
    lists = lists_of([Major(0, 1024, (0, heads))], [1024], [cell], 128, 64)
    for some in (slice(0, 8 * HEADS_TOGETHER), slice(8 * HEADS_TOGETHER, None)):
        work = lists.work[some]
        assert len(set(work[:, 1].tolist())) == HEADS_TOGETHER
        lengths = lists.records[work[:, 0], 4]
        assert (np.diff(lengths) <= 0).all()
        assert lengths[0] > lengths[-1]


def test_rows_without_blocks_are_listed_with_nothing_to_do():
    lists = lists_of([Major(0, 100, (0, 2))], [], [], 32, 32)
    assert sorted(map(tuple, lists.work.tolist())) == [(r, h) for r in range(4) for h in (0, 1)]
    assert not lists.records[:, 4::2].any()


def test_more_tiles_than_an_entry_can_name_are_refused():
    with pytest.raises(InputError, match="smaller tiles"):
        lists_of([Major(0, 1, (0, 1))], [2**21 + 1], [], 32, 32)
