"""Bounds the makespan of jobs from below: heads, tails, and one stream at a time, preemptively.

A job's head is a time before which it cannot start, its tail one that must pass after its end.
Jobs on one stream, each with head r, duration p and tail q, need at least the makespan of their
preemptive schedule in which the job with the largest tail always goes first (Jackson's rule,
Carlier 1982), since any true schedule is also a preemptive one.

Heads themselves are sharpened in the same way: a job that depends on several jobs of one stream
cannot start before these have been done one after another. Tails mirror that.

A note on pivots. A rank's longest launch c waits for what stream R brings and lets go what stream S
takes away. Another launch x of that rank runs before c, and what it alone needs is then received
before c starts; or after c, and what it alone gives is then sent after c has ended:

    R   |needed by c.........|by x|
    c                             |c.............|            x before c: its receive delays c
    S                                            |given by c....|

    R   |needed by c.........|
    c                        |c.............|                 x after c: its send comes behind
    S                                       |given by c....|by x|

So the pass takes at least what c needs on R, c, what c gives on S, and for every x the lesser of
the two.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence

from ultraattn.planning.schedule_model import Jobs


def one_stream_bound(jobs: Sequence[tuple[int, int, int]]) -> int:
    """The makespan of the best preemptive schedule of (head, duration, tail) on one stream.

    >>> one_stream_bound([(0, 10, 0), (10, 20, 0), (30, 10, 10)])
    50
    """
    waiting = sorted(jobs)
    ready: list[list[int]] = []  # (-tail, duration left)
    time, at, bound = 0, 0, 0
    while at < len(waiting) or ready:
        if not ready:
            time = max(time, waiting[at][0])
        while at < len(waiting) and waiting[at][0] <= time:
            heapq.heappush(ready, [-waiting[at][2], waiting[at][1]])
            at += 1
        tail, left = -ready[0][0], ready[0][1]
        until = waiting[at][0] if at < len(waiting) else time + left
        if time + left <= until:
            heapq.heappop(ready)
            time += left
            bound = max(bound, time + tail)
        else:
            ready[0][1] = left - (until - time)
            time = until
    return bound


def heads_of(jobs: Jobs) -> list[int]:
    """For each job, a time before which no schedule can start it."""
    duration = jobs.duration.tolist()
    streams, before = jobs.streams.rows(), jobs.depends_on.rows()
    heads = [0] * len(duration)
    for job in jobs.order:
        head = 0
        by_stream: dict[int, list[int]] = defaultdict(list)
        for other in before[job]:
            head = max(head, heads[other] + duration[other])
            for stream in streams[other]:
                by_stream[stream].append(other)
        for others in by_stream.values():
            if len(others) > 1:
                time = 0
                for release, length in sorted((heads[o], duration[o]) for o in others):
                    time = max(time, release) + length
                head = max(head, time)
        heads[job] = head
    return heads


def tails_of(jobs: Jobs) -> list[int]:
    """For each job, a time that must pass after its end in every schedule."""
    return heads_of(jobs.reversed())


def pivot_bound(jobs: Jobs, heads: Sequence[int], tails: Sequence[int], known: int) -> int:
    """The best bound by pivots (see the note above), or `known` where none is better."""
    duration, streams = jobs.duration.tolist(), jobs.streams.rows()
    on = [0] * jobs.stream_count  # the jobs of each stream, as the bits of an integer
    for job, row in enumerate(streams):
        for stream in row:
            on[stream] |= 1 << job
    load = [sum(duration[job] for job in _bits(some)) for some in on]
    ways = [
        (_reached(each), edge, _feeding(each, on))
        for each, edge in ((jobs, heads), (jobs.reversed(), tails))
    ]
    for stream, some in enumerate(on):
        if any(stream not in feeding for _, _, feeding in ways):
            continue
        sides = [(reached, edge, feeding[stream]) for reached, edge, feeding in ways]
        most = sum(load[side] for _, _, side in sides)
        for pivot in _bits(some):
            if most + duration[pivot] > known:
                bounds = [
                    _side(
                        pivot, some, on[side], [each[0] for each in ways], reached, edge, duration
                    )
                    for reached, edge, side in sides
                ]
                bound = sum(least for least, _ in bounds) + duration[pivot]
                known = max(known, bound + sum(map(min, *(alone for _, alone in bounds))))
    return known


def _side(
    pivot: int,
    some: int,
    row: int,
    both: Sequence[Sequence[int]],
    reached: Sequence[int],
    edge: Sequence[int],
    duration: Sequence[int],
) -> tuple[int, list[int]]:
    """Before a pivot (or after it, by `reached`): the time that its own jobs of the stream `row`
    need, and what each job of its stream, `some`, that may stand on either side of it adds."""
    counted = reached[pivot] & row
    time = sum(duration[job] for job in _bits(counted))
    # Where the pivot needs nothing of that stream itself, it may be the first of all.
    least = min((edge[job] for job in _bits(counted)), default=edge[pivot])
    free = some & ~(1 << pivot) & ~both[0][pivot] & ~both[1][pivot]
    alone = []
    for x in _bits(free):
        more = reached[x] & row & ~counted
        counted |= more
        alone.append(sum(duration[job] for job in _bits(more)))
        for job in _bits(more):
            least = min(least, edge[job])
    return time + least, alone


def _bits(some: int) -> list[int]:
    """The places of the ones of an integer, descending."""
    found = []
    while some:
        found.append(some.bit_length() - 1)
        some ^= 1 << found[-1]
    return found


def _reached(jobs: Jobs) -> list[int]:
    """For each job, those that must have ended before it starts, as the bits of an integer."""
    reached = [0] * len(jobs)
    before = jobs.depends_on.rows()
    for job in jobs.order:
        for other in before[job]:
            reached[job] |= reached[other] | 1 << other
    return reached


def _feeding(jobs: Jobs, on: Sequence[int]) -> dict[int, int]:
    """For each stream, the other one with the most work that its jobs depend on."""
    duration, streams, before = jobs.duration.tolist(), jobs.streams.rows(), jobs.depends_on.rows()
    feeding = {}
    for stream, some in enumerate(on):
        load: dict[int, int] = defaultdict(int)
        for other in {other for job in _bits(some) for other in before[job]}:
            for side in streams[other]:
                if side != stream:
                    load[side] += duration[other]
        if load:
            feeding[stream] = max(sorted(load), key=load.__getitem__)
    return feeding


def stream_bound(jobs: Jobs, heads: Sequence[int], tails: Sequence[int]) -> int:
    """The best bound by heads and tails, and by one stream at a time."""
    duration = jobs.duration.tolist()
    bound = max((h + p + q for h, p, q in zip(heads, duration, tails, strict=True)), default=0)
    by_stream: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for job, streams in enumerate(jobs.streams.rows()):
        for stream in streams:
            by_stream[stream].append((heads[job], duration[job], tails[job]))
    return max([bound, *(one_stream_bound(group) for group in by_stream.values())])


def lower_bound(jobs: Jobs) -> int:
    """A makespan below which no schedule of these jobs exists."""
    heads, tails = heads_of(jobs), tails_of(jobs)
    return pivot_bound(jobs, heads, tails, stream_bound(jobs, heads, tails))
