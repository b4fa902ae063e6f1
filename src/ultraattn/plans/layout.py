"""Says where the tokens of a sequence live: which rank owns each chunk, in which order."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ultraattn.chunks import Chunks, Ints
from ultraattn.errors import InputError


@dataclass(frozen=True)
class Layout:
    """Chunks of one sequence and the rank that owns each.

    A rank keeps its chunks in the order in which they stand in `chunks`.
    """

    name: str
    chunks: Chunks
    owners: tuple[int, ...]
    ranks: int

    def __post_init__(self) -> None:
        if len(self.owners) != len(self.chunks):
            raise InputError(
                f"layout {self.name!r}: {len(self.owners)} owners for {len(self.chunks)} chunks; "
                "give one owner a chunk"
            )
        wrong = [owner for owner in self.owners if not 0 <= owner < self.ranks]
        if wrong:
            raise InputError(
                f"layout {self.name!r}: owner {wrong[0]} among {self.ranks} ranks; "
                f"owners are 0 to {self.ranks - 1}"
            )

    @property
    def length(self) -> int:
        """Tokens of the sequence."""
        return self.chunks.length

    @cached_property
    def owned(self) -> tuple[tuple[int, ...], ...]:
        """For each rank, its chunks in the order it keeps them."""
        mine: list[list[int]] = [[] for _ in range(self.ranks)]
        for chunk, owner in enumerate(self.owners):
            mine[owner].append(chunk)
        return tuple(tuple(row) for row in mine)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """For each chunk, where its first row stands in its owner's local tensor."""
        at = [0] * self.ranks
        out = []
        for owner, size in zip(self.owners, self.chunks.sizes().tolist(), strict=True):
            out.append(at[owner])
            at[owner] += size
        return tuple(out)

    def local_tokens(self, rank: int) -> int:
        """Tokens that `rank` owns."""
        return sum(len(self.chunks[chunk]) for chunk in self.owned[rank])

    def positions(self, rank: int) -> Ints:
        """Token positions that `rank` owns, in local order: int64, shape (local tokens,)."""
        parts = [self.chunks[chunk].tokens() for chunk in self.owned[rank]]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
