"""What a mask looks like over chunks: the kind and the exact work of every block.

A block is BAND(lo, hi) where its visible pairs are exactly ``lo <= local q - local k <= hi``:
causal, strict causal, inverse causal and windows are bands. An open side is an int64 past any
chunk (`OPEN_LO`, `OPEN_HI`).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ultraattn.chunks import Chunks
from ultraattn.enums import StrEnum

Ints = npt.NDArray[np.int64]

OPEN_LO = -(2**62)
OPEN_HI = 2**62


class BlockKind(StrEnum):
    """The shape of the visible pairs of a block."""

    EMPTY = "empty"
    FULL = "full"
    BAND = "band"
    PARTIAL = "partial"

    @property
    def code(self) -> int:
        """Its number in the columns of `Grid.kinds`."""
        return KIND_ORDER.index(self)


KIND_ORDER = (BlockKind.EMPTY, BlockKind.FULL, BlockKind.BAND, BlockKind.PARTIAL)


@dataclass(frozen=True, eq=False)
class Grid:
    """Kinds and weights of a mask over (batch, head, query chunk, key chunk).

    Axes along which the mask does not vary have length 1. `kinds` holds `BlockKind.code`;
    `lo`, `hi` are the band limits in local positions (step counted), meaningful for BAND alone
    (0 elsewhere); `weights` are visible (query, key) pairs of one head. Grids compare by value.
    """

    q_chunks: Chunks
    kv_chunks: Chunks
    kinds: npt.NDArray[np.int8]
    lo: Ints
    hi: Ints
    weights: Ints

    @property
    def heads(self) -> int:
        """1 where the mask is the same for all heads, else the number of heads."""
        return int(self.kinds.shape[1])

    def kind(self, q_chunk: int, kv_chunk: int, head: int = 0) -> BlockKind:
        """The kind of one block; `head` counts only where the grid varies by head."""
        return KIND_ORDER[int(self.kinds[0, head if self.heads > 1 else 0, q_chunk, kv_chunk])]

    def digest(self) -> str:
        """SHA-256 over chunks, kinds, limits and weights: names a mask's effect on them."""
        state = hashlib.sha256()
        for chunks in (self.q_chunks, self.kv_chunks):
            columns = [(chunk.start, chunk.stop, chunk.step) for chunk in chunks]
            state.update(np.array([chunks.length, len(chunks)], dtype="<i8").tobytes())
            state.update(np.array(columns, dtype="<i8").tobytes())
        state.update(np.array(self.kinds.shape, dtype="<i8").tobytes())
        state.update(self.kinds.astype("i1").tobytes())
        for column in (self.lo, self.hi, self.weights):
            state.update(column.astype("<i8").tobytes())
        return state.hexdigest()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Grid):
            return NotImplemented
        return (self.q_chunks, self.kv_chunks) == (other.q_chunks, other.kv_chunks) and all(
            np.array_equal(getattr(self, name), getattr(other, name))
            for name in ("kinds", "lo", "hi", "weights")
        )

    def __hash__(self) -> int:
        return hash(self.digest())


def pairs_up_to(limit: Ints, queries: Ints, keys: Ints) -> Ints:
    """Pairs of a (queries, keys) block with ``local q - local k <= limit``, in closed form.

    Row i holds ``clip(keys - (i - limit), 0, keys)`` of them: all keys while i <= limit, then one
    fewer a row.
    """
    whole = np.clip(limit + 1, 0, queries)
    end = np.clip(limit + keys, whole, queries)
    slope = end - whole
    first = keys - (whole - limit)
    pairs: Ints = whole * keys + slope * first - slope * (slope - 1) // 2
    return pairs


def band_pairs(lo: Ints, hi: Ints, queries: Ints, keys: Ints) -> Ints:
    """Pairs of a (queries, keys) block with ``lo <= local q - local k <= hi``."""
    return pairs_up_to(hi, queries, keys) - pairs_up_to(lo - 1, queries, keys)


def classify(
    q_chunks: Chunks, kv_chunks: Chunks, weights: Ints, least: Ints, greatest: Ints
) -> Grid:
    """Names each block from its weight and the extremes of local q - local k over visible pairs.

    `weights`, `least` and `greatest` have shape (heads, query chunks, key chunks). The visible
    pairs lie within the band [least, greatest], so they are that band where they are as many.
    """
    shape = weights.shape
    queries = np.broadcast_to(q_chunks.sizes()[None, :, None], shape)
    keys = np.broadcast_to(kv_chunks.sizes()[None, None, :], shape)
    kinds = np.full(shape, BlockKind.PARTIAL.code, dtype=np.int8)
    kinds[weights == 0] = BlockKind.EMPTY.code
    kinds[(weights == queries * keys) & (weights > 0)] = BlockKind.FULL.code
    lo = np.zeros(shape, dtype=np.int64)
    hi = np.zeros(shape, dtype=np.int64)
    open_blocks = np.nonzero(kinds == BlockKind.PARTIAL.code)
    low, high = least[open_blocks], greatest[open_blocks]
    nq, nk = queries[open_blocks], keys[open_blocks]
    is_band = band_pairs(low, high, nq, nk) == weights[open_blocks]
    band = tuple(axis[is_band] for axis in open_blocks)
    kinds[band] = BlockKind.BAND.code
    lo[band] = np.where(low <= 1 - nk, OPEN_LO, low)[is_band]
    hi[band] = np.where(high >= nq - 1, OPEN_HI, high)[is_band]
    return Grid(q_chunks, kv_chunks, kinds[None], lo[None], hi[None], weights[None])
