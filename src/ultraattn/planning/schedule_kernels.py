"""Turns orders of jobs into start times, and orders into better ones: the inner loops.

Integers only, and one source for both ways to run it: compiled where numba is installed, as plain
Python over lists where it is not. Both take the same decisions, so both give the same schedule.

`graph` is (duration, stream_first, stream_of, before_first, before): job j occupies the streams
stream_of[stream_first[j]:stream_first[j + 1]] and depends on before[before_first[j]:...].
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, TypeVar

try:
    from numba import njit as _njit

    COMPILED = True
except ImportError:
    COMPILED = False

F = TypeVar("F", bound=Callable[..., Any])


def _compile(function: F) -> F:
    """`function` compiled, or as it is where numba is missing."""
    return _njit(cache=True)(function) if COMPILED else function  # type: ignore[return-value]


STALL = 1500
"""Trials without a better schedule after which the search starts again from the best."""


@_compile
def _draw(state: Any, count: int) -> int:
    """A number below `count`: xorshift of 32 bits, the same on every machine."""
    x = state[0]
    x ^= (x << 13) & 0xFFFFFFFF
    x ^= x >> 17
    x ^= (x << 5) & 0xFFFFFFFF
    state[0] = x
    return (x * count) >> 32  # type: ignore[no-any-return]


@_compile
def append(
    order: Any, graph: Any, start: Any, cause: Any, linked: Any, prev: Any, free: Any, last: Any
) -> int:
    """Starts each job, in an order that respects dependencies, once all before it are done.

    Args:
        start, cause, linked: out, (jobs,): when; the job that it waited for last, or -1; 1 where
            that is a job before it on a stream, 0 where it is a dependency.
        prev: out, as `stream_of`: the job before it on that stream, or -1.
        free, last: room, (streams,).

    Returns:
        The makespan.
    """
    duration, stream_first, stream_of, before_first, before = graph
    for stream in range(len(free)):
        free[stream] = 0
        last[stream] = -1
    makespan = 0
    for job in order:
        at = 0
        why = -1
        link = 0
        for k in range(before_first[job], before_first[job + 1]):
            other = before[k]
            end = start[other] + duration[other]
            if end > at:
                at = end
                why = other
        for k in range(stream_first[job], stream_first[job + 1]):
            stream = stream_of[k]
            if free[stream] > at:
                at = free[stream]
                why = last[stream]
                link = 1
        start[job] = at
        cause[job] = why
        linked[job] = link
        end = at + duration[job]
        for k in range(stream_first[job], stream_first[job + 1]):
            stream = stream_of[k]
            prev[k] = last[stream]
            free[stream] = end
            last[stream] = job
        if end > makespan:
            makespan = end
    return makespan


@_compile
def insert(order: Any, graph: Any, start: Any, first: Any, count: Any, begin: Any) -> int:
    """As `append`, but a job takes the earliest gap on its streams that is long enough.

    Args:
        first: (streams,): where a stream's jobs stand in `begin`.
        count: room, (streams,): jobs placed on each.
        begin: room, as long as `stream_of`: jobs of each stream in order of time.
    """
    duration, stream_first, stream_of, before_first, before = graph
    for stream in range(len(count)):
        count[stream] = 0
    makespan = 0
    for job in order:
        at = 0
        for k in range(before_first[job], before_first[job + 1]):
            end = start[before[k]] + duration[before[k]]
            if end > at:
                at = end
        moved = 1
        while moved == 1:
            moved = 0
            for k in range(stream_first[job], stream_first[job + 1]):
                base = first[stream_of[k]]
                for place in range(base + count[stream_of[k]] - 1, base - 1, -1):
                    other = begin[place]
                    if start[other] + duration[other] <= at:
                        break
                    if start[other] < at + duration[job]:
                        # It is in the way: the earliest start is after the first such job.
                        low = place
                        while low > base:
                            earlier = begin[low - 1]
                            if start[earlier] + duration[earlier] <= at:
                                break
                            low -= 1
                        other = begin[low]
                        at = start[other] + duration[other]
                        moved = 1
                        break
        start[job] = at
        if at + duration[job] > makespan:
            makespan = at + duration[job]
        for k in range(stream_first[job], stream_first[job + 1]):
            stream = stream_of[k]
            place = first[stream] + count[stream]
            while place > first[stream] and start[begin[place - 1]] > at:
                begin[place] = begin[place - 1]
                place -= 1
            begin[place] = job
            count[stream] += 1
    return makespan


@_compile
def dispatch(
    rank: Any, graph: Any, later_first: Any, later: Any, start: Any, waiting: Any, free: Any
) -> int:
    """Never lets a stream idle while a job could use it; of several, the lowest `rank` goes.

    Args:
        rank: (jobs,): a permutation.
        later_first, later: the jobs that depend on each.
        waiting: room, (jobs,); free: room, (streams,).
    """
    duration, stream_first, stream_of, before_first, _ = graph
    for stream in range(len(free)):
        free[stream] = 0
    heap = [(0, 0, 0)]
    heap.pop()
    for job in range(len(duration)):
        waiting[job] = before_first[job + 1] - before_first[job]
        start[job] = 0
        if waiting[job] == 0:
            heapq.heappush(heap, (0, rank[job], job))
    makespan = 0
    while len(heap) > 0:
        time, level, job = heapq.heappop(heap)
        at = start[job]
        for k in range(stream_first[job], stream_first[job + 1]):
            if free[stream_of[k]] > at:
                at = free[stream_of[k]]
        if at > time:
            heapq.heappush(heap, (at, level, job))
            continue
        start[job] = at
        end = at + duration[job]
        if end > makespan:
            makespan = end
        for k in range(stream_first[job], stream_first[job + 1]):
            free[stream_of[k]] = end
        for k in range(later_first[job], later_first[job + 1]):
            other = later[k]
            if end > start[other]:
                start[other] = end
            waiting[other] -= 1
            if waiting[other] == 0:
                heapq.heappush(heap, (start[other], rank[other], other))
    return makespan


@_compile
def dispatch_loaded(
    tail: Any,
    weight: int,
    graph: Any,
    later_first: Any,
    later: Any,
    start: Any,
    waiting: Any,
    ready: Any,
    free: Any,
    left: Any,
) -> int:
    """As `dispatch`, but of several jobs the one with the most ahead of it and its streams goes.

    Ahead of a job: its duration and tail, and `weight` times the work left on its streams; ties by
    the most work left on one of them, then by number. Time grows with the square of the jobs.

    Args:
        tail: (jobs,).
        ready: room, (jobs,); left: room, (streams,).
    """
    duration, stream_first, stream_of, before_first, _ = graph
    for stream in range(len(free)):
        free[stream] = 0
        left[stream] = 0
    many = 0
    for job in range(len(duration)):
        for k in range(stream_first[job], stream_first[job + 1]):
            left[stream_of[k]] += duration[job]
        waiting[job] = before_first[job + 1] - before_first[job]
        start[job] = 0
        if waiting[job] == 0:
            ready[many] = job
            many += 1
    time = 0
    makespan = 0
    while many > 0:
        chosen = -1
        first = 0
        second = 0
        soonest = -1
        for place in range(many):
            job = ready[place]
            at = start[job]
            most = 0
            total = 0
            for k in range(stream_first[job], stream_first[job + 1]):
                stream = stream_of[k]
                if free[stream] > at:
                    at = free[stream]
                if left[stream] > most:
                    most = left[stream]
                total += left[stream]
            if at > time:
                if soonest < 0 or at < soonest:
                    soonest = at
                continue
            ahead = duration[job] + tail[job] + weight * total
            better = chosen < 0 or ahead > first
            if chosen >= 0 and ahead == first:
                better = most > second or (most == second and job < ready[chosen])
            if better:
                chosen = place
                first = ahead
                second = most
        if chosen < 0:
            time = soonest
            continue
        job = ready[chosen]
        many -= 1
        ready[chosen] = ready[many]
        start[job] = time
        end = time + duration[job]
        if end > makespan:
            makespan = end
        for k in range(stream_first[job], stream_first[job + 1]):
            free[stream_of[k]] = end
            left[stream_of[k]] -= duration[job]
        for k in range(later_first[job], later_first[job + 1]):
            other = later[k]
            if end > start[other]:
                start[other] = end
            waiting[other] -= 1
            if waiting[other] == 0:
                ready[many] = other
                many += 1
    return makespan


@_compile
def _pull(
    job: int, target: int, order: Any, place: Any, graph: Any, prev: Any, mark: Any, out: Any
) -> bool:
    """Writes to `out` the order in which `job`, and what it needs, come before `target`.

    False where `target` itself is needed.
    """
    _, stream_first, _, before_first, before = graph
    low, high = place[target], place[job]
    for at in range(low, high + 1):
        mark[order[at]] = 0
    mark[job] = 1
    for at in range(high, low, -1):
        here = order[at]
        if mark[here] == 0:
            continue
        for k in range(before_first[here], before_first[here + 1]):
            mark[before[k]] = 1
        if here != job:
            for k in range(stream_first[here], stream_first[here + 1]):
                if prev[k] >= 0:
                    mark[prev[k]] = 1
    if mark[target] == 1:
        return False
    for at in range(low):
        out[at] = order[at]
    to = low
    for wanted in range(1, -1, -1):
        for at in range(low, high + 1):
            if mark[order[at]] == wanted:
                out[to] = order[at]
                to += 1
    for at in range(high + 1, len(order)):
        out[at] = order[at]
    return True


@_compile
def _push(
    job: int, target: int, order: Any, place: Any, graph: Any, prev: Any, mark: Any, out: Any
) -> bool:
    """Writes to `out` the order in which `job`, and what needs it, come after `target`.

    False where `target` itself needs it.
    """
    _, stream_first, _, before_first, before = graph
    low, high = place[job], place[target]
    for at in range(low, high + 1):
        mark[order[at]] = 0
    mark[job] = 1
    for at in range(low + 1, high + 1):
        here = order[at]
        held = 0
        for k in range(before_first[here], before_first[here + 1]):
            other = before[k]
            if low <= place[other] and place[other] < at and mark[other] == 1:
                held = 1
        for k in range(stream_first[here], stream_first[here + 1]):
            other = prev[k]
            if other >= 0 and other != job and low <= place[other] and mark[other] == 1:
                held = 1
        mark[here] = held
    if mark[target] == 1:
        return False
    for at in range(low):
        out[at] = order[at]
    to = low
    for wanted in range(2):
        for at in range(low, high + 1):
            if mark[order[at]] == wanted:
                out[to] = order[at]
                to += 1
    for at in range(high + 1, len(order)):
        out[at] = order[at]
    return True


@_compile
def improve(
    trials: int,
    bound: int,
    best: Any,
    graph: Any,
    orders: Any,
    starts: Any,
    causes: Any,
    links: Any,
    prevs: Any,
    place: Any,
    mark: Any,
    path: Any,
    history: Any,
    free: Any,
    last: Any,
    state: Any,
) -> int:
    """Moves jobs along critical paths, `trials` times; `best` holds the best order, in and out.

    A job waits, on the critical path, for another on its stream: it is moved before that one, or
    before an earlier one of the same chain, or that one after it. A trial is kept when it is no
    worse than the present order or than the one of len(history) trials ago (Burke and Bykov's late
    acceptance).

    Args:
        orders, starts, causes, links, prevs: pairs of rooms: the present order and the trial.
        place, mark, path: room, (jobs,); history: room; free, last: room, (streams,).
        state: (1,): the generator, never 0.

    Returns:
        The makespan of `best`.
    """
    duration = graph[0]
    order, trial = orders
    start, trial_start = starts
    cause, trial_cause = causes
    link, trial_link = links
    prev, trial_prev = prevs
    jobs = len(order)
    found = -1
    now = 0
    stalled = STALL
    for step in range(trials):
        if stalled >= STALL:
            stalled = 0
            for k in range(jobs):
                order[k] = best[k]
                place[best[k]] = k
            now = append(order, graph, start, cause, link, prev, free, last)
            slack = now >> 6
            if found < 0:
                found = now
                slack = 0
            for k in range(len(history)):
                history[k] = now + slack
        if found <= bound:
            return found
        stalled += 1
        # A critical path, from its end: the jobs that wait for one on their stream.
        ends = 0
        job = -1
        for k in range(jobs):
            if start[k] + duration[k] == now:
                ends += 1
                if ends == 1 or _draw(state, ends) == 0:
                    job = k
        length = 0
        while job >= 0:
            if link[job] == 1:
                path[length] = job
                length += 1
            job = cause[job]
        if length == 0:
            return found
        job = path[_draw(state, length)]
        other = cause[job]
        way = _draw(state, 4)
        if way == 2:
            while link[other] == 1 and _draw(state, 3) > 0:
                other = cause[other]
        if way < 3:
            able = _pull(job, other, order, place, graph, prev, mark, trial)
        else:
            able = _push(other, job, order, place, graph, prev, mark, trial)
        if not able:
            continue
        made = append(trial, graph, trial_start, trial_cause, trial_link, trial_prev, free, last)
        at = step % len(history)
        if made <= now or made <= history[at]:
            order, trial = trial, order
            start, trial_start = trial_start, start
            cause, trial_cause = trial_cause, cause
            link, trial_link = trial_link, link
            prev, trial_prev = trial_prev, prev
            now = made
            for k in range(jobs):
                place[order[k]] = k
            if now < found:
                found = now
                stalled = 0
                for k in range(jobs):
                    best[k] = order[k]
        history[at] = now
    return found
