"""Turns a program into jobs, and a schedule of them into the program's order of issue.

Tasks are numbered anew by their start. A dependency ends before what follows it starts, and a
stream runs one task at a time, so numbers ascend along both: the rules of `plans.check.order` hold
for every schedule, and both ranks of a transfer see one order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ultraattn.chunks import Ints
from ultraattn.errors import InputError
from ultraattn.planning.schedule_model import Jobs, Schedule
from ultraattn.plans.columns import Ragged, column
from ultraattn.plans.program import TASK_ORDER, Program, StreamColumns, TaskColumns


def jobs_of(program: Program, durations: Sequence[int] | Ints) -> Jobs:
    """One job a task, on the streams that the program gives it.

    Args:
        program: whose tasks.
        durations: of each task, at least 1 (see `to_integer_durations`).

    Raises:
        InputError: a task stands on no stream, a duration is missing, or there is a cycle.
    """
    tasks = program.tasks
    count = len(tasks.rank)
    if len(durations) != count:
        raise InputError(f"{len(durations)} durations for {count} tasks: give one a task")
    streams: list[list[int]] = [[] for _ in range(count)]
    for stream, members in enumerate(program.streams.tasks.rows()):
        for task in members:
            streams[task].append(stream)
    kinds, ranks = tasks.kind.tolist(), tasks.rank.tolist()
    names = tuple(
        f"task {task} ({TASK_ORDER[kinds[task]]} on rank {ranks[task]})" for task in range(count)
    )
    return Jobs(column(durations), Ragged.of(streams), tasks.depends_on, names)


def reorder(program: Program, schedule: Schedule) -> Program:
    """The same program, issued in the order of a schedule: by start, ties as before.

    Raises:
        InputError: the schedule breaks a dependency, or values share buffers, which is decided
            after the order.
    """
    order = np.argsort(schedule.start, kind="stable")
    return renumber(program, order.tolist())


def renumber(program: Program, order: Sequence[int]) -> Program:
    """The same program with task ``order[i]`` as task i; the order respects dependencies."""
    tasks, streams = program.tasks, program.streams
    buffers = program.values.buffer[program.values.buffer >= 0]
    if len(np.unique(buffers)) < len(buffers):
        raise InputError(
            "values of the program share buffers, which holds for its present order only; order "
            "tasks first, then share buffers"
        )
    number = [0] * len(order)
    for new, old in enumerate(order):
        number[old] = new
    depends = tasks.depends_on.rows()
    for new, old in enumerate(order):
        for other in depends[old]:
            if number[other] >= new:
                raise InputError(
                    f"task {old} comes before task {other}, on which it depends; order tasks by a "
                    "schedule of this program"
                )
    index = np.array(order, dtype=np.int64)
    reads, writes, tile = tasks.reads.rows(), tasks.writes.rows(), tasks.tile.rows()
    return replace(
        program,
        tasks=TaskColumns(
            kind=column(tasks.kind[index]),
            op=column(tasks.op[index]),
            rank=column(tasks.rank[index]),
            reads=Ragged.of([reads[old] for old in order]),
            writes=Ragged.of([writes[old] for old in order]),
            depends_on=Ragged.of([sorted(number[o] for o in depends[old]) for old in order]),
            tile=Ragged.of([tile[old] for old in order]),
        ),
        streams=StreamColumns(
            streams.rank,
            streams.kind,
            Ragged.of([sorted(number[task] for task in row) for row in streams.tasks.rows()]),
        ),
    )
