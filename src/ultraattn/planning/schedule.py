"""Turns jobs into a short schedule, with a bound that says how short one could be at best.

    rules ──► both ways ──► local search ──► solver, cold ──► solver, hinted
                 (stops as soon as a schedule is as short as the bound)

`effort` counts steps, so that the same jobs give the same schedule on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ultraattn.planning.list_schedule import Lists, breadth_first, by_rules
from ultraattn.planning.schedule_bounds import lower_bound
from ultraattn.planning.schedule_model import (
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

    trials: int
    """Of local search, times the number of jobs."""
    solver_jobs: int
    """The most jobs that the solver is asked about."""
    solver_time: float
    """Deterministic time of one run."""


STEPS = {
    Effort.INSTANT: Steps(0, 0, 0.0),
    Effort.FAST: Steps(200_000, 0, 0.0),
    Effort.NORMAL: Steps(2_000_000, 400, 0.25),
    Effort.BEST: Steps(20_000_000, 1_000, 0.5),
}


def schedule(jobs: Jobs, effort: Effort = Effort.NORMAL) -> Schedule:
    """A schedule of all jobs.

    Raises:
        MissingExtraError: OR-Tools is missing at `normal` or `best`.
    """
    require_solver(effort)
    if not len(jobs):
        return Schedule(np.zeros(0, dtype=np.int64), 0, 0, True, "nothing to do")
    lists, steps, bound = Lists(jobs), STEPS[effort], lower_bound(jobs)
    best, origin = None, ""
    for name, start in by_rules(lists).items():
        if best is None or lists.makespan(start) < lists.makespan(best):
            best, origin = start, name
    assert best is not None
    if steps.trials and lists.makespan(best) > bound:
        searched = lists.search(best, bound, max(1, steps.trials // len(jobs)))
        if lists.makespan(searched) < lists.makespan(best):
            best, origin = searched, "local search"
    if len(jobs) <= steps.solver_jobs:
        from ultraattn.planning.schedule_solver import solve

        for name in ("solver", "solver, hinted"):
            makespan = lists.makespan(best)
            if makespan == bound:
                break
            hint = best if name != "solver" else None
            solved = solve(jobs, bound, makespan, steps.solver_time, hint)
            bound = max(bound, solved.lower_bound)
            if solved.start is not None:
                best, origin = solved.start, name
    makespan = lists.makespan(best)
    return Schedule(best, makespan, bound, makespan == bound, origin)


def quick(jobs: Jobs) -> int:
    """The makespan of a good list schedule: what fusion compares."""
    return schedule(jobs, Effort.INSTANT).makespan


def baseline(jobs: Jobs) -> Schedule:
    """The breadth-first list schedule, as FlexFlow's: what ours is compared with."""
    start = breadth_first(jobs)
    makespan, bound = int((start + jobs.duration).max(initial=0)), lower_bound(jobs)
    return Schedule(start, makespan, bound, makespan == bound, "breadth first")
