"""The mask given as a table of cells, each empty, full or causal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ultraattn.errors import InputError
from ultraattn.masks.base import CELL_ORDER, JSON, CellKind, Table, listed
from ultraattn.masks.cells import CellMask
from ultraattn.masks.draw import show


@dataclass(frozen=True, repr=False)
class Blocks(CellMask):
    """See `from_blocks`."""

    values: Table

    name = "from_blocks"

    def params(self) -> dict[str, JSON]:
        rows: list[JSON] = self.values.values.tolist()
        return {"table": rows}

    def table(self) -> npt.NDArray[np.int8]:
        return self.values.values


def from_blocks(table: npt.ArrayLike | Sequence[Sequence[CellKind | str | int]]) -> Blocks:
    """Cells of the sequence's own grid: 0 or "empty", 1 or "full", 2 or "causal" (square tables).

    Token t of S lies in cell ``floor(t * n / S)``. Square tables need equal lengths; others take
    any.
    """
    rows = [
        [_code(cell) for cell in listed(row, "a row of the table")]
        for row in listed(table, "from_blocks: table")
    ]
    widths = sorted({len(row) for row in rows})
    if len(widths) != 1 or widths[0] == 0:
        raise InputError(
            f"a table of {len(rows)} rows of lengths {widths}: expected one or more rows of one "
            "length; give every row as many cells"
        )
    if len(rows) != widths[0] and any(CellKind.CAUSAL.code in row for row in rows):
        raise InputError(
            f"a table of {len(rows)} x {widths[0]} cells with causal ones: expected a square "
            "table; cut the cells so that the diagonal runs corner to corner"
        )
    return Blocks(Table(rows))


def _code(cell: object) -> int:
    if isinstance(cell, str) and cell in list(CellKind):
        return CellKind(cell).code
    if isinstance(cell, (bool, int, np.bool_, np.integer)) and 0 <= int(cell) < len(CELL_ORDER):
        return int(cell)
    raise InputError(
        f"table cell {cell!r}; choose 0, 1, 2 or one of {', '.join(CellKind)} for each cell"
    )


def main() -> None:
    """Draws it."""
    show(from_blocks([[2, 0, 0, 1], [1, 2, 0, 0], [0, 1, 2, 0], [0, 0, 1, 2]]))


if __name__ == "__main__":
    main()
