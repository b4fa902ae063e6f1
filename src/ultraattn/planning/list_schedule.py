"""Turns jobs into schedules without a solver: rules, gaps filled both ways, local search.

`breadth_first` is the order in which FlexFlow issues its tasks, kept as the baseline: any order
that respects dependencies, found breadth first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ultraattn.chunks import Ints
from ultraattn.planning import schedule_kernels as kernels
from ultraattn.planning.schedule_bounds import heads_of, tails_of
from ultraattn.planning.schedule_model import Jobs

HISTORY = 64
"""Trials after which a schedule is compared with the one before them."""

PASSES = 8
"""Times that a schedule is pushed to its end and back, at most, while it gets shorter."""

PLAIN_ROUNDS = 3
"""Rounds of `shake` before it shifts at random."""

QUICK = 200
"""Trials of the search of `predict`."""


class Lists:
    """Schedules of some jobs, made from orders."""

    def __init__(self, jobs: Jobs) -> None:
        self.jobs = jobs
        self._forward = _graph(jobs)
        self._backward = _graph(jobs.reversed())
        counts = np.bincount(jobs.streams.items, minlength=jobs.stream_count)
        self._first = _held(np.concatenate([[0], np.cumsum(counts)]))

    def append(self, order: Sequence[int]) -> Ints:
        """Starts, where every stream runs its jobs in the given order."""
        n, width, streams = len(self.jobs), len(self.jobs.streams.items), self.jobs.stream_count
        start = _room(n)
        kernels.append(
            _held(order), self._forward, start, _room(n), _room(n), _room(width),
            _room(streams), _room(streams),
        )  # fmt: skip
        return _ints(start)

    def dispatch(self, priority: Sequence[tuple[int, ...]]) -> Ints:
        """Starts, where no stream waits for a job while it could run another; least goes first."""
        order = sorted(range(len(self.jobs)), key=lambda job: (priority[job], job))
        return self._dispatch(self._forward, self._backward, np.array(order, dtype=np.int64))

    def _dispatch(self, graph: Any, other_way: Any, order: Ints) -> Ints:
        """`order` lists jobs, the first to go first."""
        rank = np.empty(len(order), dtype=np.int64)
        rank[order] = np.arange(len(order))
        start = _room(len(order))
        later = other_way[3], other_way[4]
        room = _room(len(order)), _room(self.jobs.stream_count)
        kernels.dispatch(_held(rank), graph, *later, start, *room)
        return _ints(start)

    def dispatch_loaded(self, tails: Sequence[int], weight: int) -> Ints:
        """As `dispatch`, by tails and `weight` times the work that is left on a job's streams."""
        n, streams = len(self.jobs), self.jobs.stream_count
        start, later = _room(n), (self._backward[3], self._backward[4])
        kernels.dispatch_loaded(
            _held(tails), weight, self._forward, *later, start, _room(n), _room(n),
            _room(streams), _room(streams),
        )  # fmt: skip
        return _ints(start)

    def shake(self, start: Ints, bound: int, rounds: int) -> Ints:
        """Dispatches backwards by ends, then forwards by those starts, again and again.

        From the fourth round on, ends are shifted at random by up to 1/64 of the makespan. The
        best schedule is kept; stops at `bound`.
        """
        best = now = start
        noise = np.arange(1, len(start) + 1, dtype=np.uint32) * np.uint32(2654435761)
        for turn in range(rounds):
            if self.makespan(best) <= bound:
                break
            late_first = -(now + self.jobs.duration)
            if turn >= PLAIN_ROUNDS:
                noise = _next(noise)
                late_first = late_first + (noise.astype(np.int64) * self.makespan(now) >> 38)
            late = self._dispatch(
                self._backward, self._forward, np.argsort(late_first, kind="stable")
            )
            begin = -(late + self.jobs.duration)
            again = self._dispatch(self._forward, self._backward, np.argsort(begin, kind="stable"))
            again = self.justify(again)
            if self.makespan(again) < self.makespan(best):
                best = again
            close = self.makespan(again) <= self.makespan(best) * 101 // 100
            now = again if close else best
        return best

    def justify(self, start: Ints) -> Ints:
        """Pushes all jobs as late as possible, then as early as possible, while that shortens."""
        best, makespan = start, self.makespan(start)
        for _ in range(PASSES):
            end = best + self.jobs.duration
            late = self._insert(self._backward, np.lexsort((np.arange(len(end)), -best, -end)))
            begin = -(late + self.jobs.duration)
            again = self._insert(self._forward, np.lexsort((np.arange(len(end)), begin)))
            made = self.makespan(again)
            if made >= makespan:
                break
            best, makespan = again, made
        return best

    def _insert(self, graph: Any, order: Ints) -> Ints:
        start, width = _room(len(self.jobs)), len(self.jobs.streams.items)
        kernels.insert(
            _held(order), graph, start, self._first, _room(self.jobs.stream_count), _room(width)
        )
        return _ints(start)

    def search(self, start: Ints, bound: int, trials: int) -> Ints:
        """Local search from a schedule; stops at `bound`. Never longer than `start`."""
        n, width, streams = len(self.jobs), len(self.jobs.streams.items), self.jobs.stream_count
        best = _held(self.sorted(start))

        def pair(count: int) -> Any:
            return _room(count), _room(count)

        kernels.improve(
            trials, bound, best, self._forward, pair(n), pair(n), pair(n), pair(n), pair(width),
            _room(n), _room(n), _room(n), _room(HISTORY), _room(streams), _room(streams),
            _held([0x9E3779B9]),
        )  # fmt: skip
        return self.append(_ints(best).tolist())

    def sorted(self, start: Ints) -> Ints:
        """Jobs by start, ties by number: an order that respects dependencies and streams."""
        return np.argsort(start, kind="stable").astype(np.int64)

    def makespan(self, start: Ints) -> int:
        """The end of the last job."""
        return int((start + self.jobs.duration).max(initial=0))


def breadth_first(jobs: Jobs) -> Ints:
    """Starts of the baseline: jobs are issued breadth first, as by FlexFlow's scheduler."""
    return Lists(jobs).append(jobs.order)


def rules(jobs: Jobs) -> dict[str, list[tuple[int, ...]]]:
    """Priorities of each rule, one tuple a job; the least goes first."""
    heads, tails, duration = heads_of(jobs), tails_of(jobs), jobs.duration.tolist()
    streams, followers = jobs.streams.rows(), jobs.followers.rows()
    load = np.zeros(jobs.stream_count, dtype=np.int64)
    for job, row in enumerate(streams):
        load[row] += duration[job]
    busiest = [max(int(load[s]) for s in row) for row in streams]
    feeds = _heaviest_following(jobs, followers, busiest)
    found: dict[str, list[tuple[int, ...]]] = {
        "longest tail": [(-(t + d), h) for t, d, h in zip(tails, duration, heads, strict=True)],
        "longest tail behind it": [(-t, d) for t, d in zip(tails, duration, strict=True)],
        "busiest stream": [(-b, -t) for b, t in zip(busiest, tails, strict=True)],
        "feeds the busiest stream": [(-f, -t) for f, t in zip(feeds, tails, strict=True)],
        "shortest": [(d, -t) for d, t in zip(duration, tails, strict=True)],
        "most followers": [(-len(f), -t) for f, t in zip(followers, tails, strict=True)],
        "earliest head": [(h, -t) for h, t in zip(heads, tails, strict=True)],
        "latest start": [(h - t, -t) for h, t in zip(heads, tails, strict=True)],
        "number": [()] * len(jobs),
    }
    return found


def predict(jobs: Jobs) -> int:
    """The makespan of two rules and a short search: what fusion compares, thousands of times."""
    if not len(jobs):
        return 0
    lists, tails, duration = Lists(jobs), tails_of(jobs), jobs.duration.tolist()
    by_tail = [(-(t + d),) for t, d in zip(tails, duration, strict=True)]
    behind = [(-t, d) for t, d in zip(tails, duration, strict=True)]
    starts = [lists.justify(lists.dispatch(priority)) for priority in (by_tail, behind)]
    return lists.makespan(lists.search(min(starts, key=lists.makespan), 0, QUICK))


def _heaviest_following(
    jobs: Jobs, followers: Sequence[Sequence[int]], busiest: Sequence[int]
) -> list[int]:
    """For each job, the most work of a stream that it or anything after it runs on."""
    out = list(busiest)
    for job in reversed(jobs.order):
        for later in followers[job]:
            out[job] = max(out[job], out[later])
    return out


def by_rules(lists: Lists) -> dict[str, Ints]:
    """The schedule of every rule, justified both ways, and the baseline's."""
    found = {"breadth first": lists.append(lists.jobs.order)}
    for name, priority in rules(lists.jobs).items():
        found[name] = lists.justify(lists.dispatch(priority))
    return found


def backwards(lists: Lists) -> dict[str, Ints]:
    """The schedules of the rules for time running backwards, turned round."""
    mirror = Lists(lists.jobs.reversed())
    found = {}
    for name, late in by_rules(mirror).items():
        begin = mirror.makespan(late) - (late + lists.jobs.duration)
        found[f"{name}, backwards"] = lists.justify(begin)
    return found


def by_load(lists: Lists) -> dict[str, Ints]:
    """Schedules by what is left on the streams: good where many jobs are ready at once."""
    tails = tails_of(lists.jobs)
    return {
        "tail, then load left": lists.justify(lists.dispatch_loaded(tails, 0)),
        "tail and load left": lists.justify(lists.dispatch_loaded(tails, 1)),
    }


def _next(noise: Any) -> Any:
    """Xorshift of 32 bits, one generator a job."""
    noise = noise ^ (noise << np.uint32(13))
    noise = noise ^ (noise >> np.uint32(17))
    return noise ^ (noise << np.uint32(5))


def _graph(jobs: Jobs) -> tuple[Any, ...]:
    parts = jobs.streams.offsets, jobs.streams.items, jobs.depends_on.offsets, jobs.depends_on.items
    return tuple(_held(part) for part in (jobs.duration, *parts))


def _held(values: Any) -> Any:
    """Integers as the inner loops want them: an array where compiled, a list where not."""
    array = np.array(values, dtype=np.int64)
    return array if kernels.COMPILED else array.tolist()


def _room(count: int) -> Any:
    return _held(np.zeros(count, dtype=np.int64))


def _ints(values: Any) -> Ints:
    return np.array(values, dtype=np.int64)
