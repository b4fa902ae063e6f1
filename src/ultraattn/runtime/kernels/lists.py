"""Turns the blocks of a launch into lists of tiles: for every tile of rows, the tiles it looks at.

A launch holds chunks of rows (majors) and of columns (minors). Rows are cut into tiles of `major`,
columns into tiles of `minor`, and only tiles that hold visible pairs are listed: full ones, which
need no mask, and partial ones, each with a pattern of bits. Patterns are kept once: every tile on
the diagonal of a causal block has the same.

    band, tiles of 2 x 2                 full tiles      partial tiles (pattern)
    x . . . . .                 tile 0   -               0 (lower left)
    x x . . . .                 tile 1   0               1 (lower left)
    x x x . . .                 tile 2   1               0 (upper right), 2 (lower left)
    x x x x . .
    . x x x x .
    . . x x x x

For dK and dV keys are the rows and queries the columns: the same lists of the transposed blocks.
Nothing here is larger than a strip of one block: `major` rows of a PARTIAL block at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ultraattn.errors import InputError
from ultraattn.masks.grid import BlockKind

Ints = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]
Truth = Callable[[int, int, int, bool], Bools]
"""(head, first, last + 1, by minor) to the visible pairs of these rows: (rows, columns); where
`by minor`, of these columns: (columns, rows)."""

MINORS = 2**15
TILES = 2**16
"""A list entry holds a minor chunk (15 bits) and a tile within it (16 bits)."""
HEADS_TOGETHER = 8
"""Heads whose tiles are in flight at once: few enough for their keys to stay in the cache."""
PARTIAL_COST = 1.25
"""Time of a partial tile over a full one, for the order of work."""


@dataclass(frozen=True)
class Cell:
    """A block as a launch sees it.

    Attributes:
        major, minor: numbers of its chunks among the launch's rows and columns.
        heads: query heads [start, stop).
        kind: FULL, BAND or PARTIAL.
        lo, hi: limits of a BAND: row i sees column j iff lo <= i - j <= hi.
        truth: for PARTIAL, its visible pairs.
        by_head: whether `truth` differs from head to head.
        swapped: whether rows are the columns of `truth`.
    """

    major: int
    minor: int
    heads: tuple[int, int]
    kind: BlockKind
    lo: int = 0
    hi: int = 0
    truth: Truth | None = None
    by_head: bool = False
    swapped: bool = False

    def transposed(self) -> Cell:
        """The block with its columns as rows."""
        return replace(
            self, major=self.minor, minor=self.major, lo=-self.hi, hi=-self.lo,
            swapped=not self.swapped,
        )  # fmt: skip

    def strip(self, head: int, first: int, last: int) -> Bools:
        """The visible pairs of rows [first, last): (rows, columns)."""
        assert self.truth is not None  # the block is PARTIAL
        return self.truth(head, first, last, self.swapped)


@dataclass(frozen=True)
class Major:
    """Rows whose results stand together: of chunk `chunk`, `rows` of them, heads [start, stop).

    Heads are those of the rows: key/value heads where rows are keys.
    """

    chunk: int
    rows: int
    heads: tuple[int, int]


@dataclass(frozen=True, eq=False)
class Lists:
    """What a kernel reads to find its tiles; all int32.

    Attributes:
        work: (programs, 2): record and head of each program, in the order in which they start.
        records: (tiles, 3 + 4 members): major, first row, rows; then for each of the row head's
            query heads the first full entry, full entries, first partial entry, partial entries.
        entries: minor << 16 | tile, one more than there are.
        patterns: for each partial entry its pattern; 0 for full ones.
        bits: (patterns, major, minor / 32): bit j of word w of row i is the pair (i, 32 w + j).
        full, partial: tiles to compute, over all heads.
    """

    work: Ints
    records: Ints
    entries: Ints
    patterns: Ints
    bits: Ints
    full: int
    partial: int


def lists_of(
    majors: Sequence[Major],
    minors: Sequence[int],
    cells: Sequence[Cell],
    major: int,
    minor: int,
    members: int = 1,
) -> Lists:
    """The lists of a launch.

    Args:
        majors: where results go; two of the same chunk and head are an error of the caller.
        minors: columns of each minor chunk.
        cells: blocks, disjoint.
        major: rows of a tile.
        minor: columns of a tile, a multiple of 32.
        members: query heads of one head of the rows: 1 where rows are queries, else the group.

    Raises:
        InputError: more chunks or tiles than an entry can name.
    """
    if len(minors) > MINORS or max(minors, default=0) > TILES * minor:
        raise InputError(
            f"{len(minors)} chunks of at most {max(minors, default=0)} tokens in one launch: "
            f"expected at most {MINORS} of {TILES * minor}; plan with smaller tiles"
        )
    return _Maker(minors, cells, major, minor, members).make(majors)


class _Maker:
    def __init__(
        self, minors: Sequence[int], cells: Sequence[Cell], major: int, minor: int, members: int
    ) -> None:
        self.minors, self.cells = minors, cells
        self.major, self.minor, self.members = major, minor, members
        self.by_chunk: dict[int, list[int]] = defaultdict(list)
        for index, cell in enumerate(cells):
            self.by_chunk[cell.major].append(index)
        self.known: dict[bytes, int] = {}
        self.bits: list[npt.NDArray[np.uint8]] = []
        self.tables: dict[tuple[int, int], tuple[npt.NDArray[np.int8], Ints]] = {}
        self.entries: list[Ints] = []
        self.patterns: list[Ints] = []
        self.listed = 0
        self.full = self.partial = 0

    def make(self, majors: Sequence[Major]) -> Lists:
        records: list[Ints] = []
        work: list[Ints] = []
        costs: list[npt.NDArray[np.float64]] = []
        count = 0
        for number, part in enumerate(majors):
            heads_of: dict[tuple[tuple[tuple[int, int], ...], ...], list[int]] = defaultdict(list)
            for head in range(*part.heads):
                heads_of[self.key(part.chunk, head)].append(head)
            for key, heads in heads_of.items():
                some, cost = self.rows_of(number, part, key)
                records.append(some)
                at = np.arange(count, count + len(some), dtype=np.int32)
                count += len(some)
                work.append(
                    np.stack(
                        [
                            np.tile(at, len(heads)),
                            np.repeat(np.array(heads, dtype=np.int32), len(some)),
                        ],
                        axis=1,
                    ).astype(np.int32)
                )
                costs.append(np.tile(cost, len(heads)))
                self.full += int(some[:, 4::4].sum()) * len(heads)
                self.partial += int(some[:, 6::4].sum()) * len(heads)
        order = np.zeros(0, dtype=np.int64)
        if work:
            every, cost = np.concatenate(work), np.concatenate(costs)
            order = np.lexsort((every[:, 1], -cost, every[:, 1] // HEADS_TOGETHER))
        words = self.minor // 32
        bits = np.concatenate(self.bits) if self.bits else np.zeros(0, dtype=np.uint8)
        nothing = np.zeros(1, dtype=np.int32)
        width = 3 + 4 * self.members
        return Lists(
            work=every[order] if work else np.zeros((0, 2), dtype=np.int32),
            records=np.concatenate(records) if records else np.zeros((0, width), dtype=np.int32),
            entries=np.concatenate([*self.entries, nothing]),
            patterns=np.concatenate([*self.patterns, nothing]),
            bits=bits.view("<i4").astype(np.int32, copy=False).reshape(-1, self.major, words),
            full=self.full,
            partial=self.partial,
        )

    def key(self, chunk: int, head: int) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each query head of a row head, the (cell, head of its mask) that it has."""
        return tuple(
            tuple(
                (index, one if self.cells[index].by_head else 0)
                for index in self.by_chunk[chunk]
                if self.cells[index].heads[0] <= one < self.cells[index].heads[1]
            )
            for one in range(head * self.members, (head + 1) * self.members)
        )

    def rows_of(
        self, number: int, part: Major, key: tuple[tuple[tuple[int, int], ...], ...]
    ) -> tuple[Ints, npt.NDArray[np.float64]]:
        """The records of the tiles of `part` for heads that have the cells of `key`; their cost."""
        tiles = -(-part.rows // self.major)
        found = np.zeros((tiles, 3 + 4 * self.members), dtype=np.int32)
        first = np.arange(tiles, dtype=np.int32) * self.major
        found[:, 0] = number
        found[:, 1] = first
        found[:, 2] = np.minimum(self.major, part.rows - first)
        cost = np.zeros(tiles)
        listed: dict[tuple[tuple[int, int], ...], Ints] = {}
        for member, some in enumerate(key):
            if some not in listed:
                listed[some] = self.listed_of(part, some, tiles)
            found[:, 3 + 4 * member : 7 + 4 * member] = listed[some]
            cost += listed[some][:, 1] + PARTIAL_COST * listed[some][:, 3]
        return found, cost

    def listed_of(self, part: Major, some: tuple[tuple[int, int], ...], tiles: int) -> Ints:
        """Appends the entries of these cells; (tiles, 4) of where they stand and how many."""
        found = np.zeros((tiles, 4), dtype=np.int32)
        names, kinds, patterns = [], [], []
        for index, head in some:
            kind, pattern = self.table(index, head, part.rows)
            kinds.append(kind)
            patterns.append(pattern)
            tile = np.arange(kind.shape[1], dtype=np.int32)
            names.append(np.int32(self.cells[index].minor << 16) | tile)
        if not some:
            return found
        name, kind = np.concatenate(names), np.concatenate(kinds, axis=1)
        pattern = np.concatenate(patterns, axis=1)
        for which, column in ((1, 0), (2, 2)):
            at, column_of = np.nonzero(kind == which)
            counts = np.bincount(at, minlength=tiles)
            found[:, column] = self.listed + np.concatenate([[0], np.cumsum(counts)[:-1]])
            found[:, column + 1] = counts
            self.entries.append(name[column_of])
            self.patterns.append(pattern[at, column_of])
            self.listed += len(at)
        return found

    def table(self, index: int, head: int, rows: int) -> tuple[npt.NDArray[np.int8], Ints]:
        """(tiles, tiles) of a cell: 0 nothing, 1 full, 2 partial; and the patterns of partial."""
        if (index, head) not in self.tables:
            cell = self.cells[index]
            if cell.kind is BlockKind.PARTIAL:
                found = self.partial_table(cell, head, rows)
            else:
                found = self.band_table(cell, rows)
            self.tables[index, head] = found
        return self.tables[index, head]

    def band_table(self, cell: Cell, rows: int) -> tuple[npt.NDArray[np.int8], Ints]:
        cols = self.minors[cell.minor]
        top = np.arange(0, rows, self.major, dtype=np.int64)[:, None]
        left = np.arange(0, cols, self.minor, dtype=np.int64)[None, :]
        bottom, right = np.minimum(top + self.major, rows), np.minimum(left + self.minor, cols)
        lo, hi = -(rows + cols), rows + cols
        if cell.kind is BlockKind.BAND:
            lo, hi = max(lo, cell.lo), min(hi, cell.hi)
        least, most = top - (right - 1), bottom - 1 - left
        kind = np.where((most >= lo) & (least <= hi), 2, 0).astype(np.int8)
        kind[(least >= lo) & (most <= hi) & (right - left == self.minor)] = 1
        pattern = np.zeros(kind.shape, dtype=np.int32)
        at = np.nonzero(kind == 2)
        distance = (top - left)[at]
        width = np.broadcast_to(right - left, kind.shape)[at]
        # Limits beyond the tile are all alike.
        far = self.major + self.minor
        keys = np.stack(
            [np.clip(lo - distance, -far, far), np.clip(hi - distance, -far, far), width], axis=1
        )
        i = np.arange(self.major)[:, None]
        j = np.arange(self.minor)[None, :]
        unique, which = np.unique(keys, axis=0, return_inverse=True)
        numbers = [
            self.pattern((i - j >= a) & (i - j <= b) & (j < w)) for a, b, w in unique.tolist()
        ]
        if numbers:
            pattern[at] = np.array(numbers, dtype=np.int32)[which.reshape(-1)]
        return kind, pattern

    def partial_table(self, cell: Cell, head: int, rows: int) -> tuple[npt.NDArray[np.int8], Ints]:
        cols = self.minors[cell.minor]
        tiles, across = -(-rows // self.major), -(-cols // self.minor)
        kind = np.zeros((tiles, across), dtype=np.int8)
        pattern = np.zeros((tiles, across), dtype=np.int32)
        for tile in range(tiles):
            top, bottom = tile * self.major, min(rows, (tile + 1) * self.major)
            strip = np.zeros((self.major, across * self.minor), dtype=np.bool_)
            strip[: bottom - top, :cols] = cell.strip(head, top, bottom)
            cut = strip.reshape(self.major, across, self.minor)
            some = cut.any(axis=(0, 2))
            whole = cut[: bottom - top].all(axis=(0, 2))
            kind[tile] = np.where(whole, 1, np.where(some, 2, 0))
            for column in np.nonzero(kind[tile] == 2)[0].tolist():
                pattern[tile, column] = self.pattern(cut[:, column])
        return kind, pattern

    def pattern(self, seen: Bools) -> int:
        """The number of a pattern (major, minor), known or new."""
        packed = np.packbits(seen, axis=1, bitorder="little").reshape(-1)
        name = packed.tobytes()
        if name not in self.known:
            self.known[name] = len(self.bits)
            self.bits.append(packed)
        return self.known[name]
