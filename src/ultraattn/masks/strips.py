"""Turns sets of key intervals that move with the query row into sorted, disjoint ones; & and |.

Note [Strips]
~~~~~~~~~~~~~
Every analytic mask is a few trapezoids: over a run of query rows an interval of keys begins and
ends at a place that stays put or moves one key a row. `Strips` cuts the rows into bands in which
all boundaries are such lines and never meet, so a band of a million rows costs what one row does.

    sliding_window(3) over 5 tokens          rows    starts         stops
        q0  #....                            [0, 3)  0              1 + (row - 0)
        q1  ##...                            [3, 5)  1 + (row - 3)  4 + (row - 3)
        q2  ###..
        q3  .###.        (rows 0 and 2 differ in how they begin:
        q4  ..###         the window's start meets the line 0 at row 2)

Combining two masks merges their bands, then walks each band from its first row: the boundaries
are sorted, the row where the first two neighbours meet or part ends the band, and the rest of the
rows is walked again (a kinetic sweep). Inside a band one pass over the sorted boundaries, counting
how deep each side covers, gives the union or the intersection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

FAR = 2**60
"""Where the boundaries of absent intervals are put: past every token."""


@dataclass(frozen=True, eq=False)
class Strips:
    """Key intervals by bands of query rows; see Note [Strips].

    `rows` int64 (bands + 1,) are the band edges; the others int64 (bands, intervals): boundaries
    at the first row of the band, and slopes of 0 or 1 key a row. An absent interval is all zeros.
    """

    rows: Ints
    starts: Ints
    stops: Ints
    start_slopes: Ints
    stop_slopes: Ints

    def bands_of(self, rows: Ints) -> Ints:
        """The band that holds each row."""
        return np.searchsorted(self.rows, rows, side="right").astype(np.int64) - 1

    def at(self, rows: Ints) -> tuple[Ints, Ints]:
        """Starts and stops at the given query rows, each int64 (rows, intervals)."""
        band = self.bands_of(rows)
        offset = (rows - self.rows[band])[:, None]
        starts = self.starts[band] + self.start_slopes[band] * offset
        stops = self.stops[band] + self.stop_slopes[band] * offset
        return starts, stops


@dataclass(frozen=True, eq=False)
class Pieces:
    """Trapezoids in any order, overlapping at will: columns int64 (pieces,).

    Piece p covers rows [first, last) and keys [start + start_slope * t, stop + stop_slope * t) at
    row first + t; rows where that is empty, and keys outside the sequence, do not count.
    """

    first: Ints
    last: Ints
    start: Ints
    start_slope: Ints
    stop: Ints
    stop_slope: Ints

    @staticmethod
    def of(
        first: npt.ArrayLike,
        last: npt.ArrayLike,
        start: npt.ArrayLike,
        stop: npt.ArrayLike,
        start_slope: npt.ArrayLike = 0,
        stop_slope: npt.ArrayLike = 0,
    ) -> Pieces:
        """Pieces from columns that broadcast together; slopes are 0 or 1."""
        columns = np.broadcast_arrays(
            *(
                np.atleast_1d(np.asarray(column, dtype=np.int64))
                for column in (first, last, start, start_slope, stop, stop_slope)
            )
        )
        return Pieces(*columns)

    @staticmethod
    def join(parts: Sequence[Pieces]) -> Pieces:
        """All pieces of `parts`."""
        names = ("first", "last", "start", "start_slope", "stop", "stop_slope")
        return Pieces(*(np.concatenate([getattr(p, name) for p in parts]) for name in names))

    def _trimmed(self, queries: int) -> Pieces:
        """Without the rows outside [0, queries) and those where a piece is empty."""
        width = self.stop - self.start
        growth = self.stop_slope - self.start_slope
        begin = np.where(growth > 0, np.maximum(0, 1 - width), 0)
        begin = np.maximum(begin, -self.first)
        end = np.minimum(self.last, queries) - self.first
        end = np.where(growth < 0, np.minimum(end, width), end)
        keep = (begin < end) & ((growth != 0) | (width > 0))
        return Pieces(
            (self.first + begin)[keep],
            (self.first + end)[keep],
            (self.start + begin * self.start_slope)[keep],
            self.start_slope[keep],
            (self.stop + begin * self.stop_slope)[keep],
            self.stop_slope[keep],
        )

    def strips(self, queries: int, keys: int) -> Strips:
        """The union of the pieces, within [0, keys), for rows [0, queries)."""
        pieces = self._trimmed(queries)
        rows = np.unique(np.concatenate([pieces.first, pieces.last, np.array([0, queries])]))
        from_band = np.searchsorted(rows, pieces.first)
        counts = np.searchsorted(rows, pieces.last) - from_band
        piece = np.repeat(np.arange(len(counts)), counts)
        band = from_band[piece] + ranges(counts)
        order = np.argsort(band, kind="stable")
        piece, band = piece[order], band[order]
        per_band = np.bincount(band, minlength=len(rows) - 1)
        slot = ranges(per_band)
        shape = (len(rows) - 1, int(per_band.max(initial=0)))
        offset = rows[band] - pieces.first[piece]
        columns = []
        for base, slope in (
            (pieces.start[piece], pieces.start_slope[piece]),
            (pieces.stop[piece], pieces.stop_slope[piece]),
        ):
            for values in (base + slope * offset, slope):
                column = np.zeros(shape, dtype=np.int64)
                column[band, slot] = values
                columns.append(column)
        starts, start_slopes, stops, stop_slopes = columns
        drawn = Strips(rows, starts, stops, start_slopes, stop_slopes)
        return combine(drawn, rectangle(queries, keys), np.logical_and)


def ranges(counts: npt.NDArray[np.integer]) -> Ints:
    """0..c-1 for each count c, end to end.

    >>> ranges(np.array([2, 0, 3])).tolist()
    [0, 1, 0, 1, 2]
    """
    ends = np.cumsum(counts, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    within: Ints = np.arange(total, dtype=np.int64) - np.repeat(ends - counts, counts)
    return within


def rectangle(queries: int, keys: int) -> Strips:
    """Every row sees every key."""
    bands = min(1, queries)
    zero = np.zeros((bands, 1), dtype=np.int64)
    return Strips(np.array([0, queries][: bands + 1]), zero, zero + keys, zero, zero)


def combine(a: Strips, b: Strips, rule: Callable[[Bools, Bools], Bools]) -> Strips:
    """Strips of the keys for which ``rule(in a, in b)`` holds; both cover the same rows.

    `rule` is `np.logical_and` or `np.logical_or` (it must be false for two falses).
    """
    rows = np.union1d(a.rows, b.rows)
    values, slopes, signs, sides = [], [], [], []
    for side, strips in enumerate((a, b)):
        starts, stops = strips.at(rows[:-1])
        band = strips.bands_of(rows[:-1])
        absent = starts >= stops
        for step, bounds, speeds in (
            (1, starts, strips.start_slopes[band]),
            (-1, stops, strips.stop_slopes[band]),
        ):
            values.append(np.where(absent, FAR, bounds))
            slopes.append(np.where(absent, 0, speeds))
            signs.append(np.full(bounds.shape[1], step))
            sides.append(np.full(bounds.shape[1], side))
    value, slope = np.concatenate(values, axis=1), np.concatenate(slopes, axis=1)
    sign = np.broadcast_to(np.concatenate(signs), value.shape)
    side_of = np.broadcast_to(np.concatenate(sides), value.shape)
    first, last = rows[:-1], rows[1:]
    done: list[Strips] = []
    while len(first):
        # Ties are ordered by slope, so that neighbours which part at the next row stay sorted.
        order = np.argsort(value * 2 + slope, axis=1, kind="stable")
        value = np.take_along_axis(value, order, axis=1)
        slope = np.take_along_axis(slope, order, axis=1)
        sign = np.take_along_axis(sign, order, axis=1)
        side_of = np.take_along_axis(side_of, order, axis=1)
        length = _rows_until_meeting(value, slope, last - first)
        depth_a, depth_b = (np.cumsum(sign * (side_of == s), axis=1) for s in (0, 1))
        inside = rule(depth_a > 0, depth_b > 0)
        done.append(_sweep(first, value, slope, inside))
        more = length < last - first
        first, last = (first + length)[more], last[more]
        value = value[more] + slope[more] * length[more][:, None]
        slope, sign, side_of = slope[more], sign[more], side_of[more]
    return _compact(_stack(done, rows))


def _rows_until_meeting(value: Ints, slope: Ints, length: Ints) -> Ints:
    """Rows for which sorted boundaries keep their order and their ties, at most `length`."""
    if value.shape[1] < 2:
        return length
    gap, closing = np.diff(value, axis=1), -np.diff(slope, axis=1)
    event = np.where(closing > 0, gap, FAR)
    event[(gap == 0) & (closing < 0)] = 1
    rows: Ints = np.minimum(event.min(axis=1), length)
    return rows


def _sweep(first: Ints, value: Ints, slope: Ints, inside: Bools) -> Strips:
    """Intervals from sorted boundaries and whether the keys after each are in; rows are `first`."""
    count, width = value.shape
    closes_tie = np.ones((count, width), dtype=np.bool_)
    closes_tie[:, :-1] = value[:, :-1] < value[:, 1:]
    # The state after a tie is that after its last member; before it, that of the tie before.
    latest = np.maximum.accumulate(np.where(closes_tie, np.arange(width), -1), axis=1)
    state = np.take_along_axis(inside, np.maximum(latest, 0), axis=1) & (latest >= 0)
    before = np.zeros_like(state)
    before[:, 1:] = state[:, :-1]
    begins, ends = closes_tie & state & ~before, closes_tie & ~state & before
    per_band = begins.sum(axis=1)
    slot = ranges(per_band)
    columns = []
    for edge in (begins, ends):
        band, place = np.nonzero(edge)
        for source in (value, slope):
            column = np.zeros((count, int(per_band.max(initial=0))), dtype=np.int64)
            column[band, slot] = source[band, place]
            columns.append(column)
    starts, start_slopes, stops, stop_slopes = columns
    return Strips(first, starts, stops, start_slopes, stop_slopes)


def _stack(done: list[Strips], rows: Ints) -> Strips:
    """The bands of all sweeps in row order."""
    if not done:
        none = np.zeros((0, 0), dtype=np.int64)
        return Strips(rows, none, none, none, none)
    width = max(strips.starts.shape[1] for strips in done)
    first = np.concatenate([strips.rows for strips in done])
    order = np.argsort(first, kind="stable")

    def column(name: str) -> Ints:
        parts = [getattr(strips, name) for strips in done]
        padded = [np.pad(part, ((0, 0), (0, width - part.shape[1]))) for part in parts]
        return np.asarray(np.concatenate(padded)[order])

    return Strips(
        np.append(first[order], rows[-1]),
        column("starts"),
        column("stops"),
        column("start_slopes"),
        column("stop_slopes"),
    )


def _compact(strips: Strips) -> Strips:
    """Joins each band with the one before where that one's lines simply go on."""
    if len(strips.rows) < 3:
        return strips
    length = np.diff(strips.rows)[:, None]
    values = np.concatenate([strips.starts, strips.stops], axis=1)
    slopes = np.concatenate([strips.start_slopes, strips.stop_slopes], axis=1)
    goes_on = (values[1:] == values[:-1] + slopes[:-1] * length[:-1]).all(axis=1)
    # A band of one row has no slope of its own: it may take that of the band before.
    adopts = np.flatnonzero(goes_on & (length[1:, 0] == 1)) + 1
    slopes[adopts] = slopes[adopts - 1]
    goes_on = (values[1:] == values[:-1] + slopes[:-1] * length[:-1]).all(axis=1)
    same = np.append(False, goes_on & (slopes[1:] == slopes[:-1]).all(axis=1))
    keep = ~same
    half = strips.starts.shape[1]
    return Strips(
        np.append(strips.rows[:-1][keep], strips.rows[-1]),
        values[keep, :half],
        values[keep, half:],
        slopes[keep, :half],
        slopes[keep, half:],
    )
