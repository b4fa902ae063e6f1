"""The paper's strided mask: cells of one residue see one another when they are near."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ultraattn.masks.base import whole
from ultraattn.masks.cells import CellMask
from ultraattn.masks.draw import show


@dataclass(frozen=True, repr=False)
class Strided(CellMask):
    """See `strided`."""

    grid_cells: int
    period: int
    width: int

    name = "strided"

    def table(self) -> npt.NDArray[np.int8]:
        cell = np.arange(self.grid_cells)
        residue, group = cell % self.period, cell // self.period
        near = np.abs(group[:, None] - group[None, :]) < self.width
        return np.asarray((residue[:, None] == residue[None, :]) & near, dtype=np.int8)

    def cell_order(self) -> tuple[int, ...]:
        cells = range(self.grid_cells)
        return tuple(sorted(cells, key=lambda i: (i % self.period, i // self.period)))


def strided(grid: int = 16, period: int = 4, width: int = 3) -> Strided:
    """On `grid` cells, i sees j where i = j mod `period` and |i//period - j//period| < `width`."""
    return Strided(
        whole(grid, "strided: grid"),
        whole(period, "strided: period"),
        whole(width, "strided: width"),
    )


def main() -> None:
    """Draws it."""
    show(strided())


if __name__ == "__main__":
    main()
