"""Holds the blocks of a launch of `sparse`, its lists on the device, and the sizes of its tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ultraattn.plans.head_ranges import HeadRange
from ultraattn.runtime.kernels.lists import Cell, Major, lists_of

STATS = 128
"""Rows of a tile of packed LSEs and deltas."""


class Sizes(NamedTuple):
    """How a kernel cuts: rows and columns of a tile, warps of a program, stages of its loads."""

    major: int
    minor: int
    warps: int
    stages: int


SIZES: dict[tuple[str, int], Sizes] = {
    ("forward", 64): Sizes(128, 64, 4, 3),
    ("forward", 128): Sizes(64, 64, 4, 3),
    ("forward", 256): Sizes(128, 64, 8, 2),
    ("dq", 64): Sizes(64, 64, 4, 3),
    ("dq", 128): Sizes(128, 64, 8, 3),
    ("dq", 256): Sizes(128, 32, 8, 2),
    ("dkv", 64): Sizes(64, 64, 4, 2),
    ("dkv", 128): Sizes(64, 64, 4, 2),
    ("dkv", 256): Sizes(64, 64, 8, 2),
}
"""By kernel and by the power of two that holds head_dim, in 16 bits: `benchmarks/gpu_sparse.py`."""


def sizes(which: str, dtype: torch.dtype, width: int) -> Sizes:
    """The sizes of a kernel for a head_dim padded to a power of two."""
    if dtype == torch.float32:
        return Sizes(32, 32, 4, 2)
    return SIZES[which, max(64, width)]


class Extent(NamedTuple):
    """A chunk of a launch: its tokens, and the heads that its tensors hold."""

    tokens: int
    heads: HeadRange


class Place(NamedTuple):
    """Where results of a chunk and some heads go: O and LSE; dQ; or dK and dV."""

    chunk: int
    heads: HeadRange
    tensors: tuple[Tensor, ...]


@dataclass(eq=False)
class BlockSet:
    """The blocks of a launch, and their lists once they are made.

    Attributes:
        queries: query chunks; heads are query heads.
        keys: key chunks; heads are key/value heads.
        cells: blocks: major is a query chunk, minor a key chunk.
        group: query heads of a key/value head; head h looks at key/value head h // group.
        device: where lists are kept.
    """

    queries: tuple[Extent, ...]
    keys: tuple[Extent, ...]
    cells: tuple[Cell, ...]
    group: int
    device: torch.device
    _made: dict[object, OnDevice] = field(default_factory=dict)

    @property
    def packed(self) -> list[int]:
        """The first packed row of each query chunk, and the end."""
        edges = [0]
        for chunk in self.queries:
            edges.append(edges[-1] + -(-chunk.tokens // STATS) * STATS)
        return edges

    def lists(self, which: str, size: Sizes, places: Sequence[Place]) -> OnDevice:
        """The lists of a kernel on the device."""
        key = which == "dkv", size[:2], tuple((place.chunk, place.heads) for place in places)
        found = self._made.get(key)
        if found is None:
            by_key = which == "dkv"
            rows, columns = (self.keys, self.queries) if by_key else (self.queries, self.keys)
            majors = [Major(p.chunk, rows[p.chunk].tokens, p.heads) for p in places]
            cells = [cell.transposed() for cell in self.cells] if by_key else self.cells
            made = lists_of(
                majors, [x.tokens for x in columns], cells, size.major, size.minor,
                self.group if by_key else 1,
            )  # fmt: skip
            arrays = [made.work, made.records, made.entries, made.patterns, made.bits]
            arrays.append(np.array([x.tokens for x in columns], dtype=np.int32))
            found = self._made[key] = self._kept(arrays, made.full, made.partial)
        return found

    def stats(self) -> Tensor:
        """For each tile of packed rows (chunk, first row, rows, heads)."""
        found = self._made.get("stats")
        if found is None:
            lines = [
                (i, top, min(STATS, x.tokens - top), *x.heads)
                for i, x in enumerate(self.queries)
                for top in range(0, x.tokens, STATS)
            ]
            found = self._made["stats"] = self._kept([np.array(lines, dtype=np.int32)], 0, 0)
        return found.arrays[0]

    def _kept(self, arrays: list[Any], full: int, partial: int) -> OnDevice:
        some = (x if x.size else np.zeros(1, dtype=np.int32) for x in arrays)
        return OnDevice(tuple(torch.from_numpy(x).to(self.device) for x in some), full, partial)


@dataclass(frozen=True, eq=False)
class OnDevice:
    """Lists as kernels take them: work, records, entries, patterns, bits, lengths of minors."""

    arrays: tuple[Tensor, ...]
    full: int
    partial: int
