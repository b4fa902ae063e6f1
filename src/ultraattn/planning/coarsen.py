"""Turns a program by arrival into coarser ones: a rank's launches joined by when they can run.

Head ranges and remote rows make many launches that wait for the same messages, each with a start of
its own. A launch waits for the last of the arrivals that its blocks need, here numbered 0, 1, ...;
`none` is what needs nothing that travels:

    same       launches that wait for the same arrival are one
    doubling   arrivals 0, 1, 2 and 3, 4 to 7, ...: one launch each
    two        what waits for nothing, and all the rest
    one        everything: nothing runs beside the transfers, and one start is left

Which is best depends on how long a start and a message take; simulating all four is quick.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from ultraattn.planning.fusion_candidates import arrivals
from ultraattn.planning.fusion_graph import Group, Tasks, contract
from ultraattn.plans.problem import Problem
from ultraattn.plans.program import Compute, Program, TaskKind

WAYS: dict[str, Callable[[int], int]] = {
    "same": lambda arrival: arrival,
    "doubling": lambda arrival: arrival.bit_length() if arrival > 0 else arrival,
    "two": lambda arrival: min(arrival, 0),
    "one": lambda arrival: 0,
}
"""The number of the launch that work waiting for an arrival goes to; -1 waits for nothing."""


def coarser(
    program: Program, problem: Problem, ranks_of_nodes: Sequence[int]
) -> Iterator[tuple[str, Program]]:
    """Every way that changes the program and leaves no launch waiting for itself, with its name.

    Args:
        program: a pass whose launches are small.
        problem: what it computes.
        ranks_of_nodes: the node of each rank.
    """
    tasks, by_rank = Tasks(program), _arrivals(program)
    seen = set()
    for name, way in WAYS.items():
        groups = tuple(_groups(by_rank, way))
        if not groups or groups in seen:
            continue
        seen.add(groups)
        graph = contract(tasks, groups)
        if graph is not None:
            yield name, graph.finish(problem, ranks_of_nodes)


def _arrivals(program: Program) -> list[dict[int, int]]:
    """Of each rank's launches, the arrival that each waits for; -1 where nothing travels."""
    by_rank: dict[int, list[Compute]] = defaultdict(list)
    for task in program.task_views:
        if isinstance(task, Compute):
            by_rank[task.rank].append(task)
    found = []
    for rank in sorted(by_rank):
        waits = {task.index: arrivals(program, task) for task in by_rank[rank]}
        order = {a: at for at, a in enumerate(sorted({a for some in waits.values() for a in some}))}
        found.append({t: max((order[a] for a in some), default=-1) for t, some in waits.items()})
    return found


def _groups(by_rank: Sequence[dict[int, int]], way: Callable[[int], int]) -> Iterator[Group]:
    for waits in by_rank:
        together: dict[int, list[int]] = defaultdict(list)
        for task, arrival in waits.items():
            together[way(arrival)].append(task)
        for launches in together.values():
            if len(launches) > 1:
                yield Group(tuple(sorted(launches)), TaskKind.COMPUTE)
