"""Turns transfers and collectives into bytes by rank, direction and class of link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ultraattn.chunks import Ints
from ultraattn.cluster.costs import Costs
from ultraattn.cluster.tables import Floats
from ultraattn.plans.account import moves_of
from ultraattn.plans.program import (
    COLLECTIVE_ORDER,
    TASK_ORDER,
    CollectiveOp,
    Program,
    TaskKind,
)

INSIDE, BETWEEN = 0, 1
SHARED = [
    COLLECTIVE_ORDER.index(op) for op in (CollectiveOp.ALL_GATHER, CollectiveOp.REDUCE_SCATTER)
]
TRANSFER, COLLECTIVE = (TASK_ORDER.index(k) for k in (TaskKind.TRANSFER, TaskKind.COLLECTIVE))


@dataclass(frozen=True)
class Messages:
    """What moves, as (task, source, target, bytes) rows sorted by task."""

    task: Ints
    source: Ints
    target: Ints
    bytes: Ints
    far: Ints
    """1 where the message crosses between nodes, else 0."""


def messages_of(program: Program, sizes: Ints, nodes: Sequence[int]) -> Messages:
    """All point-to-point messages of a program; a collective is its direct messages."""
    tasks, values = program.tasks, program.values
    task_of = tasks.writes.row_of
    single = tasks.kind[task_of] == TRANSFER
    task, written = task_of[single], tasks.writes.items[single]
    rows = [(task, tasks.rank[task], values.rank[written], sizes[written])]
    for index in np.flatnonzero(tasks.kind == COLLECTIVE).tolist():
        moves = moves_of(program, index)
        if len(moves):
            source, target, moved = moves.T
            rows.append((np.full(len(moves), index), source, target, sizes[moved]))
    columns = [np.concatenate(column) for column in zip(*rows, strict=True)]
    order = np.argsort(columns[0], kind="stable")
    task, source, target, amount = (column[order] for column in columns)
    node = np.asarray(nodes, dtype=np.int64)
    return Messages(task, source, target, amount, (node[source] != node[target]).astype(np.int64))


def message_seconds(
    program: Program, messages: Messages, costs: Costs, nodes: Sequence[int]
) -> tuple[Floats, Floats]:
    """Seconds of every transfer and collective alone, and the start-up in them: (tasks,) each.

    A task takes as long as the busiest direction of any rank in it: all its bytes one after
    another, start-up once. Ranks that share a NIC in one collective add up there. An all-gather
    brings each value into a node once, over all NICs, and shares it inside; a reduce-scatter
    adds up inside a node before it leaves. (`messages` and the plan's account count direct ones.)
    """
    count, ranks = len(program.tasks.rank), len(nodes)
    per_node = ranks / max(1, len(set(nodes)))
    shared = np.isin(program.tasks.op, SHARED) & (program.tasks.kind == COLLECTIVE)
    crosses = shared[messages.task] & (messages.far == BETWEEN)
    seconds, starts = np.zeros(count), np.zeros(count)
    collective = program.tasks.kind[messages.task] == COLLECTIVE
    for far, link in ((INSIDE, costs.inside), (BETWEEN, costs.between)):
        for ends in (messages.source, messages.target):
            mine = (messages.far == far) | (crosses if far == INSIDE else False)
            share = np.where(crosses, 1 / per_node if far == BETWEEN else 1 - 1 / per_node, 1.0)
            place = ends if far == INSIDE else np.where(collective, _nic(ends, nodes, costs), ends)
            width = max(ranks, costs.nics_per_node * (max(nodes, default=0) + 1))
            keys, inverse = np.unique(
                messages.task[mine] * width + place[mine], return_inverse=True
            )
            total = np.bincount(
                inverse, weights=(messages.bytes * share)[mine], minlength=len(keys)
            )
            task = keys // width
            np.maximum.at(seconds, task, link.seconds(total))
            np.maximum.at(starts, task, np.where(total > 0, link.start_s, 0.0))
    return seconds, np.minimum(starts, seconds)


def _nic(ranks: Ints, nodes: Sequence[int], costs: Costs) -> Ints:
    """The NIC that each rank uses: the ranks of a node take turns."""
    node = np.asarray(nodes, dtype=np.int64)
    first = np.zeros(int(node.max(initial=0)) + 1, dtype=np.int64)
    first[node[::-1]] = np.arange(len(node))[::-1]
    nics: Ints = node[ranks] * costs.nics_per_node + (ranks - first[node[ranks]]) % (
        costs.nics_per_node
    )
    return nics
