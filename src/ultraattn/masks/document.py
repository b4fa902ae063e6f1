"""The mask of packed documents: no token sees past the borders of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ultraattn.errors import InputError
from ultraattn.masks.base import Lengths, Mask, flag, listed, need_equal, whole
from ultraattn.masks.draw import show
from ultraattn.masks.grid import Ints
from ultraattn.masks.strips import Bools, Pieces, Strips


@dataclass(frozen=True, repr=False)
class Document(Mask):
    """See `document`."""

    lengths: tuple[int, ...]
    causal: bool

    name = "document"

    def borders(self) -> Ints:
        """First token of each document, and the end: int64 (documents + 1,)."""
        return np.concatenate([[0], np.cumsum(np.array(self.lengths, dtype=np.int64))])

    def check(self, lengths: Lengths, heads: int | None = None) -> None:
        need_equal(self, lengths)
        total = sum(self.lengths)
        if total != lengths.q:
            raise InputError(
                f"{len(self.lengths)} documents of {total} tokens in all over a sequence of "
                f"{lengths.q}: document lengths must add up to it; add a last document of padding "
                "or change the length"
            )

    def visible(
        self, q: npt.ArrayLike, kv: npt.ArrayLike, lengths: Lengths, head: int = 0, batch: int = 0
    ) -> Bools:
        self.check(lengths)
        borders = self.borders()
        own, other = (np.searchsorted(borders, np.asarray(t), side="right") for t in (q, kv))
        same = own == other
        return np.asarray(same & (np.asarray(kv) <= np.asarray(q)) if self.causal else same)

    def strips(self, lengths: Lengths) -> Strips:
        first, last = self.borders()[:-1], self.borders()[1:]
        stop = first + 1 if self.causal else last
        pieces = Pieces.of(first, last, first, stop, stop_slope=int(self.causal))
        return pieces.strips(lengths.q, lengths.kv)


def document(lengths: Sequence[int], causal: bool = True) -> Document:
    """Documents of these lengths one after another; each token sees its own (up to itself)."""
    given = listed(lengths, "document: lengths")
    sizes = tuple(whole(n, "a document length", least=0) for n in given)
    return Document(sizes, flag(causal, "document: causal"))


def main() -> None:
    """Draws it."""
    show(document([60, 100, 16, 80]))


if __name__ == "__main__":
    main()
