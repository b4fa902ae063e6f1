"""Proves schedules, or finds shorter ones, with OR-Tools' CP-SAT.

The integer program of the article (its formulas 3 to 6), with intervals in place of pairs of
big-M constraints:

    start[j] + duration[j] <= start[k]        for every k that depends on j     (4)
    the intervals of a stream do not overlap  for every stream                  (3)
    start[j] + duration[j] <= makespan        for every j                       (5)
    minimise makespan                                                           (6)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ultraattn.chunks import Ints
from ultraattn.planning.schedule_bounds import heads_of, tails_of
from ultraattn.planning.schedule_model import Jobs

RAISE_BOUND = {"linearization_level": 0, "use_objective_lb_search": True}
"""Looks for a schedule as short as the bound first: quick where there is one."""

DEDUCE = {
    "linearization_level": 0,
    "use_strong_propagation_in_disjunctive": True,
    "use_dynamic_precedence_in_disjunctive": True,
}
"""Draws more from every stream: quick where the optimum is above the bound."""


@dataclass(frozen=True, eq=False)
class Solved:
    """What the solver knows after a run."""

    start: Ints | None
    """A schedule shorter than the one given; None where none was found."""
    lower_bound: int
    """No shorter schedule exists; the given makespan where that was proved best."""


def solve(
    jobs: Jobs,
    bound: int,
    makespan: int,
    way: Mapping[str, object],
    limit: float,
    hint: Ints | None = None,
) -> Solved:
    """Looks for a schedule of length in [bound, makespan - 1].

    Args:
        bound: a lower bound.
        makespan: of a schedule that is known.
        way: parameters of the solver, `RAISE_BOUND` or `DEDUCE`.
        limit: deterministic time; a unit is 3 to 8 seconds of one core.
        hint: starts of the schedule that is known, or None for a cold run.
    """
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    heads, tails, duration = heads_of(jobs), tails_of(jobs), jobs.duration.tolist()
    longest = makespan - 1
    if any(h + d + t > longest for h, d, t in zip(heads, duration, tails, strict=True)):
        return Solved(None, makespan)
    end = model.new_int_var(bound, longest, "makespan")
    starts = [
        model.new_int_var(head, longest - tail - length, f"start_{job}")
        for job, (head, tail, length) in enumerate(zip(heads, tails, duration, strict=True))
    ]
    on_stream: dict[int, list[Any]] = defaultdict(list)
    for job, streams in enumerate(jobs.streams.rows()):
        interval = model.new_fixed_size_interval_var(starts[job], duration[job], f"job_{job}")
        for stream in streams:
            on_stream[stream].append(interval)
    for stream in sorted(on_stream):
        if len(on_stream[stream]) > 1:
            model.add_no_overlap(on_stream[stream])
    for job, before in enumerate(jobs.depends_on.rows()):
        for other in before:
            model.add(starts[other] + duration[other] <= starts[job])
    for job, tail in enumerate(tails):
        model.add(starts[job] + (duration[job] + tail) <= end)
    model.minimize(end)
    if hint is not None:
        for job, at in enumerate(hint.tolist()):
            model.add_hint(starts[job], at)

    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = limit
    for name, value in way.items():
        setattr(solver.parameters, name, value)
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return Solved(None, makespan)
    known = max(bound, round(solver.best_objective_bound))
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        found = np.array([solver.value(start) for start in starts], dtype=np.int64)
        return Solved(found, known)
    return Solved(None, min(known, makespan))
