"""The mask with which every query sees every key."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ultraattn.masks.base import CellKind, Lengths
from ultraattn.masks.cells import CellMask
from ultraattn.masks.draw import show
from ultraattn.masks.strips import Bools, Strips, rectangle


@dataclass(frozen=True, repr=False)
class Full(CellMask):
    """See `full`."""

    name = "full"

    def table(self) -> npt.NDArray[np.int8]:
        return np.array([[CellKind.FULL.code]], dtype=np.int8)

    def check(self, lengths: Lengths, heads: int | None = None) -> None:
        """Any lengths serve."""

    def visible(
        self, q: npt.ArrayLike, kv: npt.ArrayLike, lengths: Lengths, head: int = 0, batch: int = 0
    ) -> Bools:
        return np.ones(np.broadcast_shapes(np.shape(q), np.shape(kv)), dtype=np.bool_)

    def strips(self, lengths: Lengths) -> Strips:
        return rectangle(lengths.q, lengths.kv)


def full() -> Full:
    """Every query sees every key."""
    return Full()


def main() -> None:
    """Draws it."""
    show(full())


if __name__ == "__main__":
    main()
