"""The paper's star mask: every cell sees the first, and itself causally."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ultraattn.masks.base import CellKind, whole
from ultraattn.masks.cells import CellMask
from ultraattn.masks.draw import show


@dataclass(frozen=True, repr=False)
class Star(CellMask):
    """See `star`."""

    grid_cells: int

    name = "star"

    def table(self) -> npt.NDArray[np.int8]:
        table = np.zeros((self.grid_cells, self.grid_cells), dtype=np.int8)
        table[:, 0] = CellKind.FULL.code
        np.fill_diagonal(table, CellKind.CAUSAL.code)
        return table


def star(grid: int = 4) -> Star:
    """On `grid` cells, i sees j = 0 for i > 0, and the diagonal causally."""
    return Star(whole(grid, "star: grid"))


def main() -> None:
    """Draws it."""
    show(star())


if __name__ == "__main__":
    main()
