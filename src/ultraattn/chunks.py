"""Turns a sequence length into chunks: the one place that decides where chunks begin and end.

A chunk is the tokens ``range(start, stop, step)`` of one sequence. Edges of coarse partitions are
a subset of the edges of fine ones (see `edges`), so masks, layouts and coarse-to-fine search agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ultraattn.errors import InputError

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, order=True)
class Chunk:
    """Tokens ``range(start, stop, step)`` of one sequence; may be empty."""

    start: int
    stop: int
    step: int = 1

    def __post_init__(self) -> None:
        if self.step < 1 or self.start < 0 or self.stop < self.start:
            raise InputError(
                f"chunk ({self.start}, {self.stop}, {self.step}): expected 0 <= start <= stop and "
                "step >= 1; pass tokens as range(start, stop, step)"
            )

    def __len__(self) -> int:
        return len(range(self.start, self.stop, self.step))

    def tokens(self) -> Ints:
        """The token positions, ascending: int64, shape (tokens,)."""
        return np.arange(self.start, self.stop, self.step, dtype=np.int64)


@dataclass(frozen=True)
class Chunks:
    """Chunks in a given order that together hold every token of a sequence exactly once."""

    length: int
    items: tuple[Chunk, ...]

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self.items)

    def __getitem__(self, index: int) -> Chunk:
        return self.items[index]

    @property
    def contiguous(self) -> bool:
        """Whether the chunks have step 1 and follow one another in token order."""
        position = 0
        for chunk in self.items:
            if len(chunk) == 0:
                continue
            if (chunk.step != 1 and len(chunk) > 1) or chunk.start != position:
                return False
            position = chunk.start + len(chunk)
        return True

    def sizes(self) -> Ints:
        """Tokens in each chunk: int64, shape (chunks,)."""
        return np.array([len(chunk) for chunk in self.items], dtype=np.int64)

    @staticmethod
    def make(length: int, items: Sequence[Chunk]) -> Chunks:
        """Checks that `items` cover ``range(length)`` exactly once.

        Raises:
            InputError: chunks overlap or leave a gap; names the first token concerned.
        """
        count = np.zeros(length + 1, dtype=np.int64)
        for index, chunk in enumerate(items):
            if len(chunk) and chunk.tokens()[-1] >= length:
                raise InputError(
                    f"chunk {index} ({chunk.start}, {chunk.stop}, {chunk.step}) reaches past the "
                    f"sequence of {length} tokens; end it at {length} or earlier"
                )
            count[chunk.start : chunk.stop : chunk.step] += 1
        for wrong, what in ((0, "leave a gap"), (2, "overlap")):
            where = np.flatnonzero(count[:length] >= 2 if wrong else count[:length] == 0)
            if where.size:
                raise InputError(
                    f"chunks {what} at token {int(where[0])} ({where.size} tokens in all); "
                    "give chunks that hold every token exactly once"
                )
        return Chunks(length, tuple(items))


def edges(length: int, parts: int, align: int = 1) -> Ints:
    """Edge i of `parts` is ``min(S, align * floor(i * ceil(S / align) / parts))`` (design, Masks).

    Returns int64, shape (parts + 1,). Chunks may be empty when there are fewer tokens than parts.

    >>> edges(10, 4).tolist()
    [0, 2, 5, 7, 10]
    >>> edges(1000, 4, align=128).tolist()
    [0, 256, 512, 768, 1000]
    """
    if length < 0 or parts < 1 or align < 1:
        raise InputError(
            f"edges of length {length} in {parts} parts aligned to {align}: expected length >= 0, "
            "parts >= 1 and align >= 1"
        )
    units = -(-length // align)
    steps = np.arange(parts + 1, dtype=np.int64)
    return np.minimum(length, align * (steps * units // parts))


def split(length: int, parts: int, align: int = 1) -> Chunks:
    """`parts` contiguous chunks with the edges of `edges`."""
    cuts = edges(length, parts, align).tolist()
    return Chunks(length, tuple(Chunk(a, b) for a, b in pairwise(cuts)))
