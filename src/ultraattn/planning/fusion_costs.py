"""Turns a cluster's measured costs into the durations that fusion and schedule compare."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ultraattn.chunks import Ints
from ultraattn.cluster.costs import Costs
from ultraattn.planning.fusion import Cost
from ultraattn.planning.fusion_graph import Work
from ultraattn.planning.schedule_model import to_integer_durations
from ultraattn.plans.account import value_bytes
from ultraattn.plans.builder import block_columns, value_columns
from ultraattn.plans.columns import Ragged, column
from ultraattn.plans.layout import Layout
from ultraattn.plans.passes import Pass
from ultraattn.plans.problem import Problem
from ultraattn.plans.program import (
    TASK_ORDER,
    BufferColumns,
    Program,
    StreamColumns,
    TaskColumns,
)
from ultraattn.simulation.durations import copy_seconds, kernel_seconds
from ultraattn.simulation.messages import message_seconds, messages_of

Floats = np.typing.NDArray[np.float64]


def task_seconds(
    pass_: Pass,
    problem: Problem,
    q_layout: Layout,
    kv_layout: Layout,
    nodes: Sequence[int],
    program: Program,
    costs: Costs,
) -> Floats:
    """Seconds of every task of a program, alone on its streams: (tasks,)."""
    sizes = value_bytes(problem, program)
    seconds = kernel_seconds(str(pass_), problem, q_layout, kv_layout, program, costs)
    seconds = seconds + copy_seconds(program, sizes, costs)
    sending, _ = message_seconds(program, messages_of(program, sizes, nodes), costs, nodes)
    total: Floats = seconds + sending
    return total


def cost_of(
    pass_: Pass,
    problem: Problem,
    q_layout: Layout,
    kv_layout: Layout,
    nodes: Sequence[int],
    costs: Costs,
    quantum_s: float,
) -> Cost:
    """Durations for fusion, in a fixed quantum, so that parts and wholes compare."""

    def cost(works: Sequence[Work]) -> list[int]:
        if not works:
            return []
        program = _as_program(works)
        seconds = task_seconds(pass_, problem, q_layout, kv_layout, nodes, program, costs)
        counted: list[int] = np.maximum(1, np.rint(seconds / quantum_s)).astype(np.int64).tolist()
        return counted

    return cost


def quantum_of(seconds: Floats) -> float:
    """1/256 of the shortest task that takes time, or coarser to stay below the horizon."""
    _, quantum = to_integer_durations(seconds.tolist())
    return quantum


def durations_of(seconds: Floats) -> Ints:
    """Integer durations of tasks (see `to_integer_durations`)."""
    counted, _ = to_integer_durations(seconds.tolist())
    return counted


def _as_program(works: Sequence[Work]) -> Program:
    """Works side by side, as tasks of a program without order, for the cost tables to read."""
    blocks = [block for work in works for block in work.blocks]
    values = [value for work in works for value in (*work.reads, *work.writes)]
    reads, writes, tile = [], [], []
    at = first = 0
    for work in works:
        reads.append(range(at, at + len(work.reads)))
        at += len(work.reads)
        writes.append(range(at, at + len(work.writes)))
        at += len(work.writes)
        tile.append(range(first, first + len(work.blocks)))
        first += len(work.blocks)
    nothing = Ragged.of([[]] * len(works))
    return Program(
        blocks=block_columns(blocks),
        values=value_columns(values, [value.buffer for value in values]),
        tasks=TaskColumns(
            kind=column(TASK_ORDER.index(work.kind) for work in works),
            op=column(work.op for work in works),
            rank=column(work.rank for work in works),
            reads=Ragged.of(reads),
            writes=Ragged.of(writes),
            depends_on=nothing,
            tile=Ragged.of(tile),
        ),
        streams=StreamColumns(column([]), column([]), Ragged.of([])),
        buffers=BufferColumns(column([]), column([])),
    )
