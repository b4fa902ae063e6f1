"""Turns jobs into a short schedule, with a bound that says how short one could be at best.

Jobs that share nothing with the others are scheduled apart:

    rules, both ways ──► shaken, searched ──► solver, three ways ──► shaken, searched longer
              (stops as soon as a schedule is as short as the bound)

`effort` counts steps, so that the same jobs give the same schedule on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ultraattn.chunks import Ints
from ultraattn.planning.list_schedule import Lists, backwards, breadth_first, by_load, by_rules
from ultraattn.planning.schedule_bounds import (
    heads_of,
    lower_bound,
    pivot_bound,
    stream_bound,
    tails_of,
)
from ultraattn.planning.schedule_model import (
    HORIZON,
    Jobs,
    Schedule,
    check_schedule,
    to_integer_durations,
)
from ultraattn.planning.tiling import Effort, require_solver

__all__ = [
    "Jobs",
    "Schedule",
    "baseline",
    "check_schedule",
    "quick",
    "schedule",
    "to_integer_durations",
]


@dataclass(frozen=True)
class Steps:
    """How far an effort goes."""

    rounds: int
    """Of shaking (`Lists.shake`)."""
    trials: int
    """Of local search, times the number of jobs."""
    solver_jobs: int
    """The most jobs that the solver is asked about."""
    solver_time: float
    """Deterministic time of a run."""


STEPS = {
    Effort.INSTANT: Steps(0, 0, 0, 0.0),
    Effort.FAST: Steps(4, 200_000, 0, 0.0),
    Effort.NORMAL: Steps(16, 2_000_000, 400, 0.03),
    Effort.BEST: Steps(64, 20_000_000, 1_000, 0.06),
}

SHORT = 500
"""Trials of the first search: enough for most graphs, and a good limit for the solver."""
FEW = 6
"""Rounds of the first shaking."""
SEARCHED = 3
"""Schedules from which the last search starts, besides the best."""
MOST_SHAKEN = 100_000
"""Rounds of shaking times jobs, at most."""
LONG = 50_000
"""The most trials of the last."""


def schedule(jobs: Jobs, effort: Effort = Effort.NORMAL) -> Schedule:
    """A schedule of all jobs.

    Raises:
        MissingExtraError: OR-Tools is missing at `normal` or `best`.
    """
    require_solver(effort)
    if not len(jobs):
        return Schedule(np.zeros(0, dtype=np.int64), 0, 0, True, "nothing to do")
    known: dict[bytes, Schedule] = {}  # ranks often repeat each other's jobs
    parts = []
    for part in _parts(jobs):
        alone = _of(jobs, part)
        name = _bytes(alone)
        if name not in known:
            known[name] = _schedule(alone, STEPS[effort])
        parts.append((part, known[name]))
    start = np.zeros(len(jobs), dtype=np.int64)
    for part, found in parts:
        start[part] = found.start
    longest = max((found for _, found in parts), key=lambda found: found.makespan)
    bound = max(found.lower_bound for _, found in parts)
    proved = bound == longest.makespan
    return Schedule(start, longest.makespan, bound, proved, longest.origin)


def _parts(jobs: Jobs) -> list[Ints]:
    """Jobs that share no stream and no dependency with those of other parts, ascending."""
    root = list(range(len(jobs) + jobs.stream_count))

    def find(x: int) -> int:
        while root[x] != x:
            root[x] = root[root[x]]
            x = root[x]
        return x

    for job, (streams, before) in enumerate(
        zip(jobs.streams.rows(), jobs.depends_on.rows(), strict=True)
    ):
        for other in (*before, *(len(jobs) + stream for stream in streams)):
            root[find(job)] = find(other)
    members: dict[int, list[int]] = {}
    for job in range(len(jobs)):
        members.setdefault(find(job), []).append(job)
    return [np.array(part, dtype=np.int64) for part in members.values()]


def _of(jobs: Jobs, part: Ints) -> Jobs:
    """Some jobs alone, their streams numbered anew."""
    if len(part) == len(jobs):
        return jobs
    number = {job: at for at, job in enumerate(part.tolist())}
    streams, before = jobs.streams.rows(), jobs.depends_on.rows()
    stream: dict[int, int] = {}
    return Jobs.of(
        jobs.duration[part].tolist(),
        [[stream.setdefault(s, len(stream)) for s in streams[job]] for job in number],
        [[number[other] for other in before[job]] for job in number],
    )


def _bytes(jobs: Jobs) -> bytes:
    """Equal for equal jobs in equal order."""
    columns = [jobs.duration]
    for ragged in (jobs.streams, jobs.depends_on):
        columns += [ragged.offsets, ragged.items]
    return b"".join(len(c).to_bytes(4, "little") + c.tobytes() for c in columns)


def _schedule(jobs: Jobs, steps: Steps) -> Schedule:
    """A schedule of jobs that hang together."""
    heads, tails = heads_of(jobs), tails_of(jobs)
    state = _State(jobs, stream_bound(jobs, heads, tails))
    for name, start in by_rules(state.lists).items():
        state.offer(name, start)
    if steps.solver_jobs and not state.proved:
        # Half of a short search's time, and no order is better for it.
        state.bound = pivot_bound(jobs, heads, tails, state.bound)
    starts = [state.start]
    if steps.rounds and not state.proved:
        others = backwards(state.lists)
        if steps.solver_jobs:
            others |= by_load(state.lists)
        for name, start in others.items():
            state.offer(name, start)
            starts.append(start)
    long = min(LONG, steps.trials // len(jobs))
    rounds = min(steps.rounds, MOST_SHAKEN // len(jobs))
    _shake(state, "shaken", min(FEW, rounds))
    _search(state, "search", min(SHORT, long))
    if len(jobs) <= steps.solver_jobs:
        _solve(state, steps.solver_time)
    _shake(state, "shaken long", rounds)
    best = sorted(starts, key=state.lists.makespan)[:SEARCHED]
    for start in (state.start, *best):
        _search(state, "long search", long // (len(best) + 1), start)
    return state.result()


class _State:
    """The best schedule and the best bound so far."""

    def __init__(self, jobs: Jobs, bound: int) -> None:
        self.lists, self.bound = Lists(jobs), bound
        self.makespan, self.origin = HORIZON, ""
        self.start = np.zeros(len(jobs), dtype=np.int64)

    def offer(self, origin: str, start: Ints) -> None:
        makespan = self.lists.makespan(start)
        if makespan < self.makespan:
            self.start, self.makespan, self.origin = start, makespan, origin

    @property
    def proved(self) -> bool:
        return self.makespan <= self.bound

    def result(self) -> Schedule:
        return Schedule(self.start, self.makespan, self.bound, self.proved, self.origin)


def _search(state: _State, name: str, trials: int, start: Ints | None = None) -> None:
    if trials and not state.proved:
        begin = state.start if start is None else start
        state.offer(name, state.lists.search(begin, state.bound, trials))


def _shake(state: _State, name: str, rounds: int) -> None:
    if rounds and not state.proved:
        state.offer(name, state.lists.shake(state.start, state.bound, rounds))


def _solve(state: _State, limit: float) -> None:
    """Cold in two ways, then with a hint and more time: a hint can slow a proof."""
    from ultraattn.planning.schedule_solver import DEDUCE, RAISE_BOUND, solve

    for way, time, hinted in (
        (RAISE_BOUND, limit, False),
        (DEDUCE, limit, False),
        (RAISE_BOUND, 3 * limit, True),
    ):
        if state.proved:
            return
        hint = state.start if hinted else None
        solved = solve(state.lists.jobs, state.bound, state.makespan, way, time, hint)
        if solved.start is not None:
            state.offer("hinted solver" if hinted else "solver", solved.start)
        state.bound = max(state.bound, solved.lower_bound)


def quick(jobs: Jobs) -> int:
    """The makespan of a good list schedule: what fusion compares."""
    return schedule(jobs, Effort.INSTANT).makespan


def baseline(jobs: Jobs) -> Schedule:
    """The breadth-first list schedule, as FlexFlow's: what ours is compared with."""
    start = breadth_first(jobs)
    makespan, bound = int((start + jobs.duration).max(initial=0)), lower_bound(jobs)
    return Schedule(start, makespan, bound, makespan == bound, "breadth first")
