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
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ultraattn.chunks import Chunks
from ultraattn.masks.grid import Grid, classify
from ultraattn.masks.strips import Ints, Strips, ranges

BATCH = 1 << 18
"""(trapezoid, key chunk) pairs handled at once, to bound memory."""

FARTHEST = 2**61
"""Past any local q - k."""

_Run: TypeAlias = tuple[Ints, Ints, Ints]
"""Trapezoids, and for each the first key chunk and the end of a run of key chunks."""


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
    shape = (len(q_chunks), len(kv_chunks))
    weights = np.zeros(shape, dtype=np.int64)
    least, greatest = np.full(shape, FARTHEST), np.full(shape, -FARTHEST)
    kv_start, kv_step, kv_size = _columns(kv_chunks)
    q_step = _columns(q_chunks)[1]
    drawn = _trapezoids(strips, q_chunks)
    for step in np.unique(kv_step[kv_size > 0]).tolist():
        of_step = np.flatnonzero((kv_step == step) & (kv_size > 0))
        of_step = of_step[np.argsort(kv_start[of_step], kind="stable")]
        scaled = _by_residue(drawn, q_step, step)
        start, size = kv_start[of_step], kv_size[of_step]
        runs = _runs_of_one(scaled, start, size) if step == 1 else _runs(scaled, start, size, step)
        shown = _Shown((len(q_chunks), len(of_step)))
        for which, first, end in runs:
            part = scaled.take(which)
            found, pairs, low, high = _clipped(part, start[first], size[first], step)
            shown.add(part.q_chunk[found], first[found], end[found], pairs, low, high)
        weights[:, of_step], least[:, of_step], greatest[:, of_step] = shown.total()
    return classify(q_chunks, kv_chunks, weights[None], least[None], greatest[None])


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


def _runs_of_one(drawn: _Trapezoids, start: Ints, size: Ints) -> Iterator[_Run]:
    """Batches of (trapezoid, key chunk) that may meet; contiguous chunks, sorted."""
    high = drawn.stop + drawn.stop_slope * (drawn.rows - 1)
    begin = np.searchsorted(start + size, drawn.start, side="right")
    counts = np.maximum(0, np.searchsorted(start, high, side="left") - begin)
    ends = np.cumsum(counts)
    at = 0
    while at < len(counts):
        base = int(ends[at - 1]) if at else 0
        to = max(at + 1, int(np.searchsorted(ends, base + BATCH, side="right")))
        which = np.repeat(np.arange(at, to), counts[at:to])
        chunk = begin[which] + ranges(counts[at:to])
        yield which, chunk, chunk + 1
        at = to


def _runs(drawn: _Trapezoids, start: Ints, size: Ints, step: int) -> Iterator[_Run]:
    """Batches of (trapezoid, run of stripes that all show the same of it); stripes sorted.

    Stripes of one size that begin within one step differ in where they first meet a boundary by
    one local key at most: before and after the residue of the boundary. Two boundaries, three runs.
    """
    period = start // step
    differs = (np.diff(period) != 0) | (np.diff(size) != 0)
    group = np.concatenate([[0], np.flatnonzero(differs) + 1])
    group_end = np.append(group[1:], len(start))
    at_once = max(1, BATCH // (3 * len(group)))
    for at in range(0, len(drawn.rows), at_once):
        part = drawn.take(slice(at, at + at_once))
        meets = []
        for boundary in (part.start, part.stop):
            token = period[group][None, :] * step + ((boundary - 1) % step)[:, None]
            meets.append(np.clip(np.searchsorted(start, token, side="right"), group, group_end))
        low, high = np.minimum(*meets), np.maximum(*meets)
        ends = [np.broadcast_to(e, low.shape) for e in (group, low, high, group_end)]
        first, end = np.stack(ends[:-1], axis=-1), np.stack(ends[1:], axis=-1)
        held = first < end
        yield at + np.nonzero(held)[0], first[held], end[held]


class _Shown:
    """Sums pairs, and finds extremes of local q - k, over runs of key chunks of one query chunk.

    Sums are kept as differences. Extremes of a run of n are those of two runs of the same power of
    two that overlap; runs of 2**l are halved into those of 2**(l-1) once all of them are in.
    """

    def __init__(self, shape: tuple[int, int]) -> None:
        self.shape = shape
        self.change = np.zeros((shape[0], shape[1] + 1), dtype=np.int64)
        self.least, self.greatest = np.full(shape, FARTHEST), np.full(shape, -FARTHEST)
        self.long: list[tuple[Ints, ...]] = []

    def add(self, q: Ints, first: Ints, end: Ints, pairs: Ints, low: Ints, high: Ints) -> None:
        """Counts `pairs` and the extremes for each chunk in [first, end) beside query chunk q."""
        np.add.at(self.change, (q, first), pairs)
        np.subtract.at(self.change, (q, end), pairs)
        one = end - first == 1
        np.minimum.at(self.least, (q[one], first[one]), low[one])
        np.maximum.at(self.greatest, (q[one], first[one]), high[one])
        if not one.all():
            self.long.append(tuple(column[~one] for column in (q, first, end, low, high)))

    def total(self) -> tuple[Ints, Ints, Ints]:
        """Pairs, least and greatest of each block: int64, `shape`."""
        weights: Ints = np.cumsum(self.change, axis=1)[:, :-1]
        if not self.long:
            return weights, self.least, self.greatest
        q, first, end, low, high = (
            np.concatenate(column) for column in zip(*self.long, strict=True)
        )
        level = np.log2(end - first).astype(np.int64)
        least, greatest = np.full(self.shape, FARTHEST), np.full(self.shape, -FARTHEST)
        for power in range(int(level.max()), -1, -1):
            at, span = level == power, 1 << power
            for place in (first[at], end[at] - span):
                np.minimum.at(least, (q[at], place), low[at])
                np.maximum.at(greatest, (q[at], place), high[at])
            if power:
                half = span // 2
                least[:, half:] = np.minimum(least[:, half:], least[:, :-half].copy())
                greatest[:, half:] = np.maximum(greatest[:, half:], greatest[:, :-half].copy())
        return weights, np.minimum(self.least, least), np.maximum(self.greatest, greatest)


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
    high, low = np.full_like(pairs, -FARTHEST), np.full_like(pairs, FARTHEST)
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
