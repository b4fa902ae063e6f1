"""Masks drawn on a grid of cells of their own: from a table of cells to truth, strips and units.

Token t of S lies in cell ``floor(t * n / S)`` of n; a CAUSAL cell shows a key whose position in
the cell is at most the query's.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ultraattn.errors import InputError
from ultraattn.masks.base import JSON, CellKind, Lengths, Mask, need_equal, whole
from ultraattn.masks.grid import Ints
from ultraattn.masks.strips import Bools, Pieces, Strips


def cell_edges(length: int, cells: int) -> Ints:
    """First token of each cell, and `length`: the least t with ``t * cells // length >= i``.

    >>> cell_edges(10, 4).tolist()
    [0, 3, 5, 8, 10]
    """
    return -(-np.arange(cells + 1, dtype=np.int64) * length // cells)


@dataclass(frozen=True, repr=False)
class CellMask(Mask):
    """A mask given by `cell_table`; square tables need equal lengths."""

    @abstractmethod
    def table(self) -> npt.NDArray[np.int8]:
        """`CellKind.code` of each (query cell, key cell): int8, may be rectangular."""

    def params(self) -> dict[str, JSON]:
        # The factories call it `grid`, which is a method here.
        return {"grid" if k == "grid_cells" else k: v for k, v in super().params().items()}

    def cell_table(self) -> npt.NDArray[np.int8] | None:
        return self.table()

    @property
    def cells(self) -> int | None:
        rows, columns = self.table().shape
        return rows if rows == columns else None

    def check(self, lengths: Lengths, heads: int | None = None) -> None:
        if self.cells is not None:
            need_equal(self, lengths)

    def visible(
        self, q: npt.ArrayLike, kv: npt.ArrayLike, lengths: Lengths, head: int = 0, batch: int = 0
    ) -> Bools:
        self.check(lengths)
        q, kv = np.asarray(q, dtype=np.int64), np.asarray(kv, dtype=np.int64)
        table = self.table()
        rows, columns = table.shape
        q_cell, kv_cell = q * rows // max(1, lengths.q), kv * columns // max(1, lengths.kv)
        state = table[q_cell, kv_cell]
        q_local = q - cell_edges(lengths.q, rows)[q_cell]
        kv_local = kv - cell_edges(lengths.kv, columns)[kv_cell]
        full, causal = state == CellKind.FULL.code, state == CellKind.CAUSAL.code
        return np.asarray(full | (causal & (kv_local <= q_local)))

    def strips(self, lengths: Lengths) -> Strips:
        table = self.table()
        rows, columns = (
            cell_edges(n, count)
            for n, count in zip((lengths.q, lengths.kv), table.shape, strict=True)
        )
        # Runs of full cells: where a row of the table, framed by zeros, steps up and down.
        full = np.pad((table == CellKind.FULL.code).astype(np.int8), ((0, 0), (1, 1)))
        change = np.diff(full, axis=1)
        cell, begin = np.nonzero(change == 1)
        end = np.nonzero(change == -1)[1]
        runs = Pieces.of(rows[cell], rows[cell + 1], columns[begin], columns[end])
        i, j = np.nonzero(table == CellKind.CAUSAL.code)
        left, right = columns[j], columns[j + 1]
        # The diagonal runs from the cell's first corner until it meets the cell's last key.
        meets = np.minimum(rows[i + 1], rows[i] + (right - left))
        below = Pieces.of(rows[i], meets, left, left + 1, stop_slope=1)
        beyond = Pieces.of(meets, rows[i + 1], left, right)
        return Pieces.join([runs, below, beyond]).strips(lengths.q, lengths.kv)

    def nominal(self, q_parts: int, kv_parts: int, *, remapped: bool = False) -> tuple[Ints, int]:
        table = self.table()
        order = self.cell_order()
        if remapped and order is not None:
            table = table[np.ix_(order, order)]
        return nominal_of_table(table, q_parts, kv_parts)


def nominal_of_table(table: npt.NDArray[np.int8], q_parts: int, kv_parts: int) -> tuple[Ints, int]:
    """Visible fraction of each block of the unit square cut q_parts x kv_parts, in exact integers.

    Sides are counted in units of 1 / lcm(cells, parts), areas in half square units, so that the
    triangle of a CAUSAL cell is whole too. Returns numerators and their common denominator, in
    lowest terms.
    """
    q_parts, kv_parts = whole(q_parts, "query parts"), whole(kv_parts, "key parts")
    side = math.lcm(q_parts, kv_parts, *table.shape)
    if side > 2**30:
        raise InputError(
            f"{q_parts} x {kv_parts} parts over {table.shape[0]} x {table.shape[1]} cells: their "
            "common multiple is too large; choose parts that divide or are divided by the cells"
        )
    q_cuts, kv_cuts = (np.arange(n + 1, dtype=np.int64) * (side // n) for n in (q_parts, kv_parts))
    q_cells, kv_cells = (np.arange(n + 1, dtype=np.int64) * (side // n) for n in table.shape)
    full = (table == CellKind.FULL.code).astype(np.int64)
    units = 2 * _overlap(q_cuts, q_cells) @ full @ _overlap(kv_cuts, kv_cells).T
    for i, j in np.argwhere(table == CellKind.CAUSAL.code).tolist():
        q = np.clip(q_cuts - q_cells[i], 0, q_cells[1])[:, None]
        kv = np.clip(kv_cuts - kv_cells[j], 0, kv_cells[1])[None, :]
        # Twice the area of {0 <= key <= query} in [0, q] x [0, kv], differenced over both axes.
        corner = np.where(kv >= q, q * q, 2 * q * kv - kv * kv)
        units += np.diff(np.diff(corner, axis=0), axis=1)
    denominator = 2 * (side // q_parts) * (side // kv_parts)
    common = math.gcd(denominator, int(np.gcd.reduce(units, axis=None)))
    return units // common, denominator // common


def _overlap(cuts: Ints, cells: Ints) -> Ints:
    """Length shared by each part and each cell, int64 (parts, cells)."""
    low = np.maximum(cuts[:-1, None], cells[None, :-1])
    high = np.minimum(cuts[1:, None], cells[None, 1:])
    shared: Ints = np.maximum(0, high - low)
    return shared
