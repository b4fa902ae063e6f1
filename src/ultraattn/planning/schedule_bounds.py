"""Bounds the makespan of jobs from below: heads, tails, and one stream at a time, preemptively.

A job's head is a time before which it cannot start, its tail one that must pass after its end.
Jobs on one stream, each with head r, duration p and tail q, need at least the makespan of their
preemptive schedule in which the job with the largest tail always goes first (Jackson's rule,
Carlier 1982), since any true schedule is also a preemptive one.

Heads themselves are sharpened in the same way: a job that depends on several jobs of one stream
cannot start before these have been done one after another. Tails mirror that.
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


def lower_bound(jobs: Jobs) -> int:
    """A makespan below which no schedule of these jobs exists."""
    heads, tails, duration = heads_of(jobs), tails_of(jobs), jobs.duration.tolist()
    bound = max((h + p + q for h, p, q in zip(heads, duration, tails, strict=True)), default=0)
    by_stream: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for job, streams in enumerate(jobs.streams.rows()):
        for stream in streams:
            by_stream[stream].append((heads[job], duration[job], tails[job]))
    return max([bound, *(one_stream_bound(group) for group in by_stream.values())])
