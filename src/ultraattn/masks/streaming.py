"""The paper's streaming mask: sink cells at the start, a few cells before, and itself causally."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ultraattn.masks.base import CellKind, whole
from ultraattn.masks.cells import CellMask
from ultraattn.masks.draw import show


@dataclass(frozen=True, repr=False)
class Streaming(CellMask):
    """See `streaming`."""

    grid_cells: int
    sink: int
    local: int

    name = "streaming"

    def table(self) -> npt.NDArray[np.int8]:
        cell = np.arange(self.grid_cells)
        i, j = cell[:, None], cell[None, :]
        table = ((j < i) & ((j < self.sink) | (i - j < self.local))).astype(np.int8)
        np.fill_diagonal(table, CellKind.CAUSAL.code)
        return table


def streaming(grid: int = 8, sink: int = 1, local: int = 3) -> Streaming:
    """On `grid` cells, i sees j < `sink`, its own `local` - 1 before, and the diagonal causally."""
    return Streaming(
        whole(grid, "streaming: grid"),
        whole(sink, "streaming: sink", least=0),
        whole(local, "streaming: local"),
    )


def main() -> None:
    """Draws it."""
    show(streaming())


if __name__ == "__main__":
    main()
