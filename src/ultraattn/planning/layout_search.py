"""Looks for a better home for each chunk: a context remap of equal shares that brings keys near.

The paper leaves the remap to be given by hand (article, chapter 8). Here chunks of equal length
trade owners as long as that lowers what row owners would fetch in all, a measure that needs no
assignment; the layouts found are then compared by real assignments (`ultraattn.planning.plan`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ultraattn.chunks import Ints
from ultraattn.plans.layout import Layout

MOST_CHUNKS = 128
"""A sweep tries every pair of chunks; beyond this many it would take seconds."""
MOST_SWEEPS = 32


def fetched(owners: Ints, sizes: Ints, visible: npt.NDArray[np.bool_], ranks: int) -> int:
    """Key rows that row owners fetch in all: each remote chunk once a rank.

    Args:
        owners: rank of each chunk, int64 (P,), of queries and keys alike.
        sizes: tokens of each chunk, int64 (P,).
        visible: whether block (query chunk, key chunk) has work, bool (P, P).
        ranks: number of ranks.
    """
    own = owners[None, :] == np.arange(ranks)[:, None]
    needed = own.astype(np.float32) @ visible.astype(np.float32) > 0
    return int(((needed & ~own) * sizes[None]).sum())


def searched(layout: Layout, visible: npt.NDArray[np.bool_]) -> Layout | None:
    """A layout whose row owners fetch less, by swaps of owners; None where no swap helps.

    Coarse pieces trade first, then finer ones: where a chunk is a small part of what a rank needs
    together, no single swap of it helps. Every swap exchanges chunks of equal length, so token
    counts stay as they are.
    """
    count = len(layout.chunks)
    if count > MOST_CHUNKS or visible.shape != (count, count):
        return None
    owners = np.array(layout.owners, dtype=np.int64)
    sizes = layout.chunks.sizes()
    first = fetched(owners, sizes, visible, layout.ranks)
    for factor in (16, 8, 4, 2, 1):
        coarse = count // factor
        if count % factor or coarse < layout.ranks:
            continue
        grouped = owners.reshape(coarse, factor)
        if (grouped != grouped[:, :1]).any():
            continue
        table = np.asarray(visible.reshape(coarse, factor, coarse, factor).any(axis=(1, 3)))
        swapped = _swap(grouped[:, 0].copy(), sizes.reshape(coarse, factor), table, layout.ranks)
        owners = np.repeat(swapped, factor)
    if fetched(owners, sizes, visible, layout.ranks) >= first:
        return None
    return Layout("searched", layout.chunks, tuple(owners.tolist()), layout.ranks)


def _swap(owners: Ints, sizes: Ints, visible: npt.NDArray[np.bool_], ranks: int) -> Ints:
    """Takes the best swap of every sweep, ties to the lowest pair, until none lowers `fetched`."""
    total = sizes.sum(axis=1)
    best = fetched(owners, total, visible, ranks)
    for _ in range(MOST_SWEEPS):
        found = None
        for a in range(len(owners)):
            for b in range(a + 1, len(owners)):
                if owners[a] == owners[b] or not np.array_equal(sizes[a], sizes[b]):
                    continue
                owners[[a, b]] = owners[[b, a]]
                value = fetched(owners, total, visible, ranks)
                owners[[a, b]] = owners[[b, a]]
                if value < best:
                    best, found = value, [a, b]
        if found is None:
            break
        owners[found] = owners[found[::-1]]
    return owners
