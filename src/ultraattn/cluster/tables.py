"""Turns tables of measured seconds into seconds for any shape and any number of bytes.

A note on kernels. Rows (q tokens, kv tokens, heads, seconds) stand on a grid of shorter sides m,
aspects q / kv and heads. Time is read off it

    between entries   log-log in m and in the aspect, linear in heads (a start-up, then work)
    outside           the nearest entry's time past the start-up, by work; never faster than the
                      best rate in the table
    where a row of the grid is missing: as outside, from the nearest one with as many heads

so that efficiency follows the shorter side, where kernels lose it, and no look-up ever fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ultraattn.errors import InputError

Floats = npt.NDArray[np.float64]
KernelRow = tuple[int, int, int, float]
"""q tokens, kv tokens, heads, seconds."""
LinkRow = tuple[int, float]
"""Bytes, seconds."""


@dataclass(frozen=True)
class KernelTable:
    """Seconds of one launch by shape, for one pass and one kind of block."""

    pass_: str
    """forward or backward."""
    kind: str
    """full, causal, or partial."""
    rows: tuple[KernelRow, ...]

    def __post_init__(self) -> None:
        bad = [row for row in self.rows if min(row[:3]) < 1 or not row[3] > 0]
        if not self.rows or bad:
            raise InputError(
                f"kernel table {self.pass_} {self.kind}: {bad[0] if bad else 'no rows'}; expected "
                "rows of q tokens, kv tokens and heads of at least 1 and a time above 0"
            )

    @cached_property
    def start_s(self) -> float:
        """The start-up: the least time in the table."""
        return min(row[3] for row in self.rows)

    @cached_property
    def peak(self) -> float:
        """The best rate in the table, in (query, key) pairs times heads a second."""
        return max(q * kv * heads / seconds for q, kv, heads, seconds in self.rows)

    @cached_property
    def _grid(self) -> tuple[Floats, Floats, Floats, Floats]:
        """Heads, log2 shorter sides, log2 aspects, and log2 seconds over all three."""
        rows = np.array(self.rows, dtype=np.float64)
        side = np.round(np.log2(np.minimum(rows[:, 0], rows[:, 1])), 9)
        aspect = np.round(np.log2(rows[:, 0] / rows[:, 1]), 9)
        heads: Floats = np.unique(rows[:, 2])
        sides: Floats = np.unique(side).astype(np.float64)
        aspects: Floats = np.unique(aspect).astype(np.float64)
        found = np.full((len(heads), len(sides), len(aspects)), np.nan)
        at = (
            np.searchsorted(heads, rows[:, 2]),
            np.searchsorted(sides, side),
            np.searchsorted(aspects, aspect),
        )
        found[at] = rows[:, 3]
        for level in range(len(heads)):
            found[level] = self._filled(found[level], sides, aspects, float(heads[level]))
        table: Floats = np.log2(found)
        return heads, sides, aspects, table

    def _filled(self, seconds: Floats, sides: Floats, aspects: Floats, heads: float) -> Floats:
        known = np.argwhere(~np.isnan(seconds))
        out = seconds.copy()
        pairs = _pairs(sides[:, None], aspects[None, :])
        for i, j in np.argwhere(np.isnan(seconds)):
            far = np.abs(sides[known[:, 0]] - sides[i]) + np.abs(aspects[known[:, 1]] - aspects[j])
            a, b = known[int(np.argmin(far))]
            past = (seconds[a, b] - self.start_s) * pairs[i, j] / pairs[a, b]
            out[i, j] = max(self.start_s + past, pairs[i, j] * heads / self.peak)
        return out

    def seconds(self, q_tokens: Any, kv_tokens: Any, heads: Any) -> Floats:
        """Seconds of launches; arguments are numbers or arrays that broadcast, at least 1."""
        q, kv, h = (np.asarray(x, dtype=np.float64) for x in (q_tokens, kv_tokens, heads))
        levels, sides, aspects, table = self._grid
        side = np.clip(np.log2(np.minimum(q, kv)), sides[0], sides[-1])
        aspect = np.clip(np.log2(q / kv), aspects[0], aspects[-1])
        i, u = _between(sides, side)
        j, v = _between(aspects, aspect)
        last_i, last_j = len(sides) - 1, len(aspects) - 1
        i2, j2 = np.minimum(i + 1, last_i), np.minimum(j + 1, last_j)
        by_level = 2.0 ** (
            (1 - u) * ((1 - v) * table[:, i, j] + v * table[:, i, j2])
            + u * ((1 - v) * table[:, i2, j] + v * table[:, i2, j2])
        )
        inside = np.clip(h, levels[0], levels[-1])
        k, w = _between(levels, inside)
        k2 = np.minimum(k + 1, len(levels) - 1)
        low = np.take_along_axis(by_level, np.broadcast_to(k, by_level.shape[1:])[None], 0)[0]
        high = np.take_along_axis(by_level, np.broadcast_to(k2, by_level.shape[1:])[None], 0)[0]
        seconds = (1 - w) * low + w * high
        scale = q * kv * h / (_pairs(side, aspect) * inside)
        scaled = np.maximum(self.start_s + (seconds - self.start_s) * scale, q * kv * h / self.peak)
        out: Floats = np.where(np.abs(scale - 1) < 1e-9, seconds, scaled)
        return out


def _pairs(side: Any, aspect: Any) -> Any:
    """q times kv from log2 of the shorter side and of the aspect."""
    return 2.0 ** (2 * side + np.abs(aspect))


def _between(points: Floats, x: Floats) -> tuple[Any, Floats]:
    """The entry before x, and how far x is on the way to the next one (0 to 1)."""
    at = np.clip(np.searchsorted(points, x, side="right") - 1, 0, max(0, len(points) - 2))
    if len(points) == 1:
        return at, np.zeros_like(x)
    share = (x - points[at]) / (points[at + 1] - points[at])
    return at, np.clip(share, 0.0, 1.0)


@dataclass(frozen=True)
class Link:
    """A class of links: seconds of one message by its bytes, both directions busy."""

    transport: str
    """What carries the message: nccl, copy_engine, gloo."""
    launch_s: float
    """Host time to issue a message; counts where nothing replays a captured graph."""
    rows: tuple[LinkRow, ...]

    def __post_init__(self) -> None:
        bad = [row for row in self.rows if row[0] < 1 or not row[1] > 0]
        if not self.rows or bad or self.launch_s < 0:
            raise InputError(
                f"link table of {self.transport}: {bad[0] if bad else 'no rows, or launch < 0'}; "
                "expected rows of at least 1 byte and a time above 0"
            )

    @cached_property
    def _curve(self) -> tuple[Floats, Floats]:
        """log2 bytes and log2 seconds; a message takes no longer than any larger one."""
        rows = np.array(sorted(self.rows), dtype=np.float64)
        seconds = np.minimum.accumulate(rows[::-1, 1])[::-1]
        return np.log2(rows[:, 0]), np.log2(seconds)

    @cached_property
    def start_s(self) -> float:
        """The time of the smallest message: start-up, not shared with others."""
        return float(2.0 ** self._curve[1][0])

    @cached_property
    def bytes_per_s(self) -> float:
        """The rate of a very large message, start-up taken off."""
        sizes, seconds = self._curve
        past = 2.0 ** seconds[-1] - self.start_s
        if past <= 0:
            return float(2.0 ** (sizes[-1] - seconds[-1]))
        return float(2.0 ** sizes[-1] / past)

    def seconds(self, bytes_: Any) -> Floats:
        """Seconds of messages alone on their links; nothing for no bytes."""
        size = np.asarray(bytes_, dtype=np.float64)
        sizes, seconds = self._curve
        inside = 2.0 ** np.interp(np.log2(np.maximum(size, 1.0)), sizes, seconds)
        beyond = self.start_s + size / self.bytes_per_s
        out = np.where(size > 2.0 ** sizes[-1], beyond, inside)
        times: Floats = np.where(size > 0, out, 0.0)
        return times
