"""Turns strips (intervals of keys by query row) into a grid, in closed form and without rows.

Note [Local coordinates]
~~~~~~~~~~~~~~~~~~~~~~~~
Query chunk with step s, key chunk (k0, step u), both counted in local positions. A boundary at
token ``x + slope * row`` is first reached at local key ``ceil((x + slope * row - k0) / u)``. Rows
are taken ``m = u / gcd(s, u)`` local queries apart, so that a moving boundary moves by a whole
number of local keys, ``p = s / gcd(s, u)``, and is the line ``c + p * t`` exactly. With contiguous
chunks, or stripes of one step, m = p = 1. What a trapezoid shows of a chunk of n keys is then

    sum over t in [t0, t1) of  min(n, cB + pB t) - max(0, cA + pA t)

over the rows [t0, t1) where that is positive; ``local q - local k`` is concave in t along the
left boundary and convex along the right one, so its extremes lie at ends and kinks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ultraattn.chunks import Chunks
from ultraattn.masks.grid import Grid, classify
from ultraattn.masks.strips import Ints, Strips, ranges

BATCH = 1 << 18
"""(trapezoid, key chunk) pairs handled at once, to bound memory."""


@dataclass(frozen=True, eq=False)
class _Trapezoids:
    """Columns int64 (trapezoids,): rows ``i0 + row_step * t``, t < rows, of one query chunk each.

    `start`, `stop` are tokens at t = 0; the slopes are local keys a step of t once scaled.
    """

    q_chunk: Ints
    i0: Ints
    rows: Ints
    row_step: Ints
    start: Ints
    stop: Ints
    start_slope: Ints
    stop_slope: Ints

    def take(self, index: npt.NDArray[np.integer] | slice) -> _Trapezoids:
        return _Trapezoids(*(getattr(self, name)[index] for name in self.__dataclass_fields__))


def grid_of_strips(strips: Strips, q_chunks: Chunks, kv_chunks: Chunks) -> Grid:
    """The exact grid (1, 1, query chunks, key chunks) of an analytic mask.

    Costs time by the bands of `strips` and the blocks they touch, not by tokens, except where the
    step of a key chunk does not divide that of a query chunk (rows are then taken by residue).
    """
    cells = len(q_chunks) * len(kv_chunks)
    weights = np.zeros(cells, dtype=np.int64)
    least = np.full(cells, 2**61, dtype=np.int64)
    greatest = np.full(cells, -(2**61), dtype=np.int64)
    kv_start, kv_step, kv_size = _columns(kv_chunks)
    q_step = _columns(q_chunks)[1]
    drawn = _trapezoids(strips, q_chunks)
    for step in np.unique(kv_step[kv_size > 0]).tolist():
        of_step = np.flatnonzero((kv_step == step) & (kv_size > 0))
        of_step = of_step[np.argsort(kv_start[of_step], kind="stable")]
        scaled = _by_residue(drawn, q_step, step)
        start, size = kv_start[of_step], kv_size[of_step]
        for which, chunk in _pairs(scaled, start, start + step * (size - 1), step):
            part = scaled.take(which)
            found, pairs, low, high = _clipped(part, start[chunk], size[chunk], step)
            cell = part.q_chunk[found] * len(kv_chunks) + of_step[chunk[found]]
            np.add.at(weights, cell, pairs)
            np.minimum.at(least, cell, low)
            np.maximum.at(greatest, cell, high)
    shape = (1, len(q_chunks), len(kv_chunks))
    return classify(
        q_chunks, kv_chunks, weights.reshape(shape), least.reshape(shape), greatest.reshape(shape)
    )


def _columns(chunks: Chunks) -> tuple[Ints, Ints, Ints]:
    """Starts, steps and sizes; the step of a chunk of one token is 1, for it does not matter."""
    table = np.array([(c.start, c.step, len(c)) for c in chunks], dtype=np.int64).reshape(-1, 3)
    start, step, size = table.T
    return start, np.where(size > 1, step, 1), size


def _trapezoids(strips: Strips, q_chunks: Chunks) -> _Trapezoids:
    """The intervals of `strips` cut at query chunks, in the chunks' local rows."""
    start, step, size = _columns(q_chunks)
    held = np.flatnonzero(size)
    first_band = strips.bands_of(start[held])
    counts = strips.bands_of(start[held] + step[held] * (size[held] - 1)) - first_band + 1
    chunk = np.repeat(held, counts)
    band = np.repeat(first_band, counts) + ranges(counts)
    i0 = np.maximum(0, _ceil(strips.rows[band] - start[chunk], step[chunk]))
    i1 = np.minimum(size[chunk], _ceil(strips.rows[band + 1] - start[chunk], step[chunk]))
    part, interval = np.nonzero((strips.starts < strips.stops)[band] & (i0 < i1)[:, None])
    chunk, band, i0, i1 = chunk[part], band[part], i0[part], i1[part]
    offset = start[chunk] + step[chunk] * i0 - strips.rows[band]
    start_slope, stop_slope = (
        slopes[band, interval] for slopes in (strips.start_slopes, strips.stop_slopes)
    )
    return _Trapezoids(
        chunk,
        i0,
        i1 - i0,
        np.ones_like(i0),
        strips.starts[band, interval] + start_slope * offset,
        strips.stops[band, interval] + stop_slope * offset,
        start_slope,
        stop_slope,
    )


def _by_residue(drawn: _Trapezoids, q_step: Ints, kv_step: int) -> _Trapezoids:
    """Splits rows by residue where a boundary would not move by whole local keys."""
    step = q_step[drawn.q_chunk]
    moves = ((drawn.start_slope | drawn.stop_slope) > 0) & (drawn.rows > 1)
    shared = np.gcd(step, kv_step)
    every = np.where(moves, kv_step // shared, 1)
    speed = step // shared
    counts = np.minimum(every, drawn.rows)
    which = np.repeat(np.arange(len(counts)), counts)
    residue = ranges(counts)
    part = drawn.take(which)
    step, every, speed = step[which], every[which], speed[which]
    return _Trapezoids(
        part.q_chunk,
        part.i0 + residue,
        _ceil(part.rows - residue, every),
        every,
        part.start + part.start_slope * step * residue,
        part.stop + part.stop_slope * step * residue,
        part.start_slope * speed,
        part.stop_slope * speed,
    )


def _pairs(drawn: _Trapezoids, start: Ints, last: Ints, step: int) -> Iterator[tuple[Ints, Ints]]:
    """Batches of (trapezoid, key chunk) that may meet; chunks sorted by their first token."""
    if step == 1:
        low = drawn.start
        high = drawn.stop + drawn.stop_slope * (drawn.rows - 1)
        begin = np.searchsorted(last, low, side="left")
        counts = np.maximum(0, np.searchsorted(start, high, side="left") - begin)
    else:
        begin = np.zeros(len(drawn.rows), dtype=np.int64)
        counts = np.full(len(drawn.rows), len(start), dtype=np.int64)
    ends = np.cumsum(counts)
    at = 0
    while at < len(counts):
        base = int(ends[at - 1]) if at else 0
        to = max(at + 1, int(np.searchsorted(ends, base + BATCH, side="right")))
        which = np.repeat(np.arange(at, to), counts[at:to])
        yield which, begin[which] + ranges(counts[at:to])
        at = to


def _clipped(
    drawn: _Trapezoids, key0: Ints, size: Ints, step: int
) -> tuple[Ints, Ints, Ints, Ints]:
    """What key chunks of `size` tokens from `key0` show: see Note [Local coordinates].

    Returns the indices that show anything, their pairs, and the least and greatest local q - k.
    """
    start, stop = _ceil(drawn.start - key0, step), _ceil(drawn.stop - key0, step)
    p_start, p_stop = drawn.start_slope, drawn.stop_slope
    none, whole = np.zeros_like(start), drawn.rows
    # stop + p_stop * t >= 1, start + p_start * t <= size - 1, and start < stop, each a range of t.
    begin = np.where(
        p_stop > 0,
        np.maximum(0, _ceil(1 - stop, np.maximum(p_stop, 1))),
        np.where(stop < 1, whole, 0),
    )
    end = np.where(
        p_start > 0,
        np.minimum(whole, (size - 1 - start) // np.maximum(p_start, 1) + 1),
        np.where(start > size - 1, none, whole),
    )
    growth = p_stop - p_start
    speed = np.maximum(np.abs(growth), 1)
    begin = np.where(growth > 0, np.maximum(begin, (start - stop) // speed + 1), begin)
    end = np.where(growth < 0, np.minimum(end, _ceil(stop - start, speed)), end)
    end = np.where((growth == 0) & (start >= stop), none, end)
    found = np.flatnonzero(begin < end)
    begin, end, start, stop, size = (x[found] for x in (begin, end, start, stop, size))
    p_start, p_stop = p_start[found], p_stop[found]
    i0, row_step = drawn.i0[found], drawn.row_step[found]
    # The boundary leaves the chunk's edge at `kink`; one that stands is inside or outside.
    start, stop = np.where(p_start > 0, start, np.maximum(start, 0)), stop
    stop = np.where(p_stop > 0, stop, np.minimum(stop, size))
    left_kink = np.clip(_ceil(-start, np.maximum(p_start, 1)), begin, end)
    left_kink = np.where(p_start > 0, left_kink, begin)
    right_kink = np.clip(_ceil(size - stop, np.maximum(p_stop, 1)), begin, end)
    right_kink = np.where(p_stop > 0, right_kink, end)
    pairs = (
        _ramp(stop, p_stop, begin, right_kink)
        + size * (end - right_kink)
        - _ramp(start, p_start, left_kink, end)
    )
    high, low = np.full_like(pairs, -(2**61)), np.full_like(pairs, 2**61)
    for left, right in ((begin, begin), (end - 1, end - 1), (left_kink, right_kink)):
        for back in (0, 1):
            t = np.clip(left - back, begin, end - 1)
            high = np.maximum(high, i0 + row_step * t - np.maximum(0, start + p_start * t))
            t = np.clip(right - back, begin, end - 1)
            low = np.minimum(low, i0 + row_step * t + 1 - np.minimum(size, stop + p_stop * t))
    return found, pairs, low, high


def _ramp(base: Ints, slope: Ints, begin: Ints, end: Ints) -> Ints:
    """Sum of ``base + slope * t`` for t in [begin, end)."""
    total: Ints = base * (end - begin) + slope * ((end * (end - 1) - begin * (begin - 1)) // 2)
    return total


def _ceil(value: Ints, divisor: Ints | int) -> Ints:
    quotient: Ints = -(-value // divisor)
    return quotient
