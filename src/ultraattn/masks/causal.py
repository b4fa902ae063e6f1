"""The mask with which a query sees the keys up to its own position, counted from the end."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ultraattn.masks.base import CellKind, Lengths
from ultraattn.masks.cells import CellMask
from ultraattn.masks.draw import show
from ultraattn.masks.strips import Bools, Pieces, Strips


@dataclass(frozen=True, repr=False)
class Causal(CellMask):
    """See `causal`."""

    name = "causal"

    def table(self) -> npt.NDArray[np.int8]:
        return np.array([[CellKind.CAUSAL.code]], dtype=np.int8)

    def check(self, lengths: Lengths, heads: int | None = None) -> None:
        """Any lengths serve: they are aligned to the end."""

    def visible(
        self, q: npt.ArrayLike, kv: npt.ArrayLike, lengths: Lengths, head: int = 0, batch: int = 0
    ) -> Bools:
        return np.asarray(np.asarray(kv) <= np.asarray(q) + (lengths.kv - lengths.q))

    def strips(self, lengths: Lengths) -> Strips:
        shift = lengths.kv - lengths.q
        piece = Pieces.of(0, lengths.q, 0, shift + 1, stop_slope=1)
        return piece.strips(lengths.q, lengths.kv)


def causal() -> Causal:
    """Query i sees keys up to ``i + keys - queries``: the last query sees all."""
    return Causal()


def main() -> None:
    """Draws it."""
    show(causal())


if __name__ == "__main__":
    main()
