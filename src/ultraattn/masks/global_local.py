"""The paper's global-local mask: the first cells see and are seen by all, the others their near."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ultraattn.masks.base import whole
from ultraattn.masks.cells import CellMask
from ultraattn.masks.draw import show


@dataclass(frozen=True, repr=False)
class GlobalLocal(CellMask):
    """See `global_local`."""

    grid_cells: int
    globals: int
    locals: int

    name = "global_local"

    def table(self) -> npt.NDArray[np.int8]:
        cell = np.arange(self.grid_cells)
        i, j = cell[:, None], cell[None, :]
        far = (i >= self.globals) & (j >= self.globals) & (np.abs(i - j) >= self.locals)
        return np.asarray(~far, dtype=np.int8)


def global_local(grid: int = 16, globals: int = 1, locals: int = 1) -> GlobalLocal:
    """On `grid` cells, i sees j where i < `globals`, j < `globals` or |i - j| < `locals`."""
    return GlobalLocal(
        whole(grid, "global_local: grid"),
        whole(globals, "global_local: globals", least=0),
        whole(locals, "global_local: locals", least=0),
    )


def main() -> None:
    """Draws it."""
    show(global_local())


if __name__ == "__main__":
    main()
