"""Turns token-level truth into a grid, row band by row band: for masks that have no intervals."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from ultraattn.chunks import Chunks
from ultraattn.masks.grid import Grid, Ints, classify
from ultraattn.masks.strips import Bools

if TYPE_CHECKING:
    from ultraattn.masks.base import Lengths, Mask, Progress

LOG = logging.getLogger(__name__)

COSTLY_TOKENS = 64 * 1024
PAIRS_PER_SECOND = 10**8
"""Of a simple function on one core: what the warning's seconds are reckoned from."""

PAIRS_AT_ONCE = 1 << 22
"""(head, query, key) truths held at once, to bound memory."""


def grid_of_tokens(
    mask: Mask,
    q_chunks: Chunks,
    kv_chunks: Chunks,
    lengths: Lengths,
    *,
    heads: int | None,
    batch: int | None,
    progress: Progress | None,
) -> Grid:
    """The exact grid (1, heads or 1, query chunks, key chunks); costs time by queries x keys.

    `progress(done, total)` is told the query rows done. Above `COSTLY_TOKENS` a warning says what
    it costs.
    """
    if max(lengths.q, lengths.kv) > COSTLY_TOKENS:
        pairs = lengths.q * lengths.kv * (heads or 1)
        LOG.warning(
            "mask %s is evaluated token by token: %s are up to %.2g truths, about %.0f s; "
            "analytic masks (causal, document, from_ranges, ..., & and |) cost none of it",
            mask,
            lengths,
            pairs,
            pairs / PAIRS_PER_SECOND,
        )
    keys = np.concatenate([np.zeros(0, dtype=np.int64), *(c.tokens() for c in kv_chunks)])
    sizes = kv_chunks.sizes()
    held = np.flatnonzero(sizes)
    offsets = (np.cumsum(sizes) - sizes)[held]
    shape = (1, len(q_chunks), len(kv_chunks))
    weights = np.zeros(shape, dtype=np.int64)
    least, greatest = np.full(shape, 2**61), np.full(shape, -(2**61))
    varies, done = False, 0
    for index, q_chunk in enumerate(q_chunks):
        rows = q_chunk.tokens()
        for part in _row_parts(len(rows), len(keys), heads):
            truth = mask.dense(rows[part], keys, lengths, heads=heads, batch=batch)[0]
            if len(truth) > len(weights):
                weights, least, greatest = (
                    np.repeat(a, len(truth), axis=0) for a in (weights, least, greatest)
                )
            varies = varies or bool((truth != truth[:1]).any())
            if len(held):
                by_key = truth.sum(axis=1, dtype=np.int64)
                weights[:, index, held] += np.add.reduceat(by_key, offsets, axis=1)
            done += truth.shape[1]
            if progress is not None:
                progress(done, q_chunks.length)
        area = len(rows) * sizes
        partly = ((weights[:, index] > 0) & (weights[:, index] < area)).any(axis=0)
        for kv_index in np.flatnonzero(partly).tolist():
            tokens = kv_chunks[kv_index].tokens()
            for part in _row_parts(len(rows), len(tokens), heads):
                truth = mask.dense(rows[part], tokens, lengths, heads=heads, batch=batch)[0]
                low, high = _extremes(truth, part.start)
                place = (slice(None), index, kv_index)
                least[place] = np.minimum(least[place], low)
                greatest[place] = np.maximum(greatest[place], high)
    if not varies:
        weights, least, greatest = weights[:1], least[:1], greatest[:1]
    return classify(q_chunks, kv_chunks, weights, least, greatest)


def _row_parts(rows: int, keys: int, heads: int | None) -> list[slice]:
    """Slices of rows whose truths fit `PAIRS_AT_ONCE`."""
    at_once = max(1, PAIRS_AT_ONCE // max(1, keys * (heads or 1)))
    return [slice(a, min(a + at_once, rows)) for a in range(0, rows, at_once)]


def _extremes(truth: Bools, first_row: int) -> tuple[Ints, Ints]:
    """Least and greatest local q - local k over visible pairs, each int64 (heads,)."""
    _, rows, keys = truth.shape
    seen = truth.any(axis=2)
    row = first_row + np.arange(rows, dtype=np.int64)
    first = truth.argmax(axis=2)
    last = keys - 1 - truth[:, :, ::-1].argmax(axis=2)
    low = np.where(seen, row - last, 2**61).min(axis=1, initial=2**61)
    high = np.where(seen, row - first, -(2**61)).max(axis=1, initial=-(2**61))
    return low, high
