"""The mask with which a query sees itself and the few keys before it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ultraattn.masks.base import Lengths, Mask, whole
from ultraattn.masks.draw import show
from ultraattn.masks.strips import Bools, Pieces, Strips


@dataclass(frozen=True, repr=False)
class SlidingWindow(Mask):
    """See `sliding_window`."""

    window: int

    name = "sliding_window"

    def visible(
        self, q: npt.ArrayLike, kv: npt.ArrayLike, lengths: Lengths, head: int = 0, batch: int = 0
    ) -> Bools:
        behind = np.asarray(q) + (lengths.kv - lengths.q) - np.asarray(kv)
        return np.asarray((behind >= 0) & (behind < self.window))

    def strips(self, lengths: Lengths) -> Strips:
        own = lengths.kv - lengths.q
        piece = Pieces.of(0, lengths.q, own - self.window + 1, own + 1, 1, 1)
        return piece.strips(lengths.q, lengths.kv)


def sliding_window(window: int) -> SlidingWindow:
    """A token sees itself and the ``window - 1`` before it; lengths are aligned to the end."""
    return SlidingWindow(whole(window, "sliding_window: window"))


def main() -> None:
    """Draws it."""
    show(sliding_window(64))


if __name__ == "__main__":
    main()
