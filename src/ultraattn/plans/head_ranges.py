"""Joins ranges of heads, and finds what is left between them. A range is (first, last + 1)."""

from __future__ import annotations

from collections.abc import Iterable

HeadRange = tuple[int, int]


def runs(ranges: Iterable[HeadRange]) -> list[HeadRange]:
    """The union of head ranges, as maximal runs in ascending order.

    >>> runs([(4, 8), (0, 4), (10, 12)])
    [(0, 8), (10, 12)]
    """
    out: list[HeadRange] = []
    for start, stop in sorted(set(ranges)):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], stop))
        else:
            out.append((start, stop))
    return out


def joined(ranges: Iterable[HeadRange]) -> list[HeadRange]:
    """Unions of ranges that overlap, ascending; ranges that only touch stay apart.

    >>> joined([(0, 2), (1, 3), (3, 4)])
    [(0, 3), (3, 4)]
    """
    out: list[HeadRange] = []
    for start, stop in sorted(set(ranges)):
        if out and start < out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], stop))
        else:
            out.append((start, stop))
    return out


def gaps(ranges: Iterable[HeadRange], heads: int) -> list[HeadRange]:
    """The parts of [0, heads) that no range holds; `ranges` ascend and do not overlap.

    >>> gaps([(1, 2), (4, 5)], 6)
    [(0, 1), (2, 4), (5, 6)]
    """
    out, at = [], 0
    for start, stop in ranges:
        if at < start:
            out.append((at, start))
        at = max(at, stop)
    if at < heads:
        out.append((at, heads))
    return out
