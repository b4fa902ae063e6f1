"""Keeps large tables as integer columns: ragged rows, and equality by content."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ultraattn.chunks import Ints


class ByContent:
    """Equality of frozen dataclasses that hold arrays: same type, same fields, same elements."""

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if isinstance(mine, np.ndarray):
                if not np.array_equal(mine, theirs):
                    return False
            elif mine != theirs:
                return False
        return True

    __hash__ = None  # type: ignore[assignment]


def column(values: Iterable[int] | Ints) -> Ints:
    """An int64 column, not to be written to."""
    if not isinstance(values, (np.ndarray, list, tuple)):
        values = list(values)
    return frozen(np.array(values, dtype=np.int64))


def frozen(array: Ints) -> Ints:
    """The same array, not to be written to from now on."""
    array.flags.writeable = False
    return array


@dataclass(frozen=True, eq=False)
class Ragged(ByContent):
    """Rows of unequal length: row i holds ``items[offsets[i]:offsets[i + 1]]``."""

    offsets: Ints
    items: Ints

    @staticmethod
    def of(rows: Sequence[Sequence[int]]) -> Ragged:
        """From a sequence of rows."""
        lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
        offsets = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        items = itertools.chain.from_iterable(rows)
        return Ragged(
            frozen(offsets), frozen(np.fromiter(items, dtype=np.int64, count=int(offsets[-1])))
        )

    @staticmethod
    def of_pairs(pairs: Ints, rows: int, base: int) -> Ragged:
        """From ascending numbers ``row * base + item`` with items below `base`."""
        offsets = np.searchsorted(pairs, np.arange(rows + 1, dtype=np.int64) * base)
        return Ragged(column(offsets), column(pairs % base if base else pairs))

    @cached_property
    def row_of(self) -> Ints:
        """The row of each item."""
        return frozen(np.repeat(np.arange(len(self)), np.diff(self.offsets)))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, index: int) -> list[int]:
        """The items of one row."""
        items: list[int] = self.items[self.offsets[index] : self.offsets[index + 1]].tolist()
        return items

    def rows(self) -> list[list[int]]:
        """All rows; cheaper than `row` one by one."""
        items, cuts = self.items.tolist(), self.offsets.tolist()
        return [items[a:b] for a, b in itertools.pairwise(cuts)]

    def to_json(self) -> dict[str, Any]:
        """Row lengths and items, as plain lists."""
        return {"lengths": np.diff(self.offsets).tolist(), "items": self.items.tolist()}
