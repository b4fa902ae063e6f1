"""Counts what a program costs: work, traffic and memory of every rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ultraattn.chunks import Ints
from ultraattn.plans.columns import ByContent
from ultraattn.plans.problem import Problem
from ultraattn.plans.program import (
    COLLECTIVE_ORDER,
    TASK_ORDER,
    Collective,
    CollectiveOp,
    Program,
    TaskKind,
    Value,
)
from ultraattn.plans.tensors import Tensor


@dataclass(frozen=True, eq=False)
class Account(ByContent):
    """Work, traffic and memory of one pass, by rank, for one batch entry. All int64, (ranks,)."""

    load: Ints
    """Visible (query, key) pairs times heads that the rank computes."""
    sent: Ints
    """Bytes."""
    received: Ints
    """Bytes."""
    sent_between_nodes: Ints
    """Bytes, of `sent`."""
    received_between_nodes: Ints
    """Bytes, of `received`."""
    memory: Ints
    """Bytes of workspace buffers."""

    @property
    def max_volume(self) -> int:
        """The most bytes that any rank sends or receives."""
        return int(max(self.sent.max(initial=0), self.received.max(initial=0)))

    @property
    def load_over_mean(self) -> float:
        """The largest load over the mean; 1 when there is no work."""
        total = int(self.load.sum())
        return float(self.load.max() * len(self.load) / total) if total else 1.0


def value_bytes(problem: Problem, program: Program) -> Ints:
    """Bytes of each value for one batch entry: int64, shape (values,)."""
    values = program.values
    area = (values.row_stop - values.row_start) * (values.head_stop - values.head_start)
    sizes: Ints = area * problem.widths.table[values.tensor, values.wide]
    return sizes


def account(problem: Problem, program: Program, nodes: Sequence[int]) -> Account:
    """Reads the costs off the program itself, so that every strategy is measured alike."""
    ranks = len(nodes)
    node = np.asarray(nodes, dtype=np.int64)
    sizes = value_bytes(problem, program)
    sent, received, far_sent, far_received = np.zeros((4, ranks), dtype=np.int64)
    load = np.zeros(ranks, dtype=np.int64)
    tasks, values = program.tasks, program.values
    writes = tasks.writes
    task_of = writes.row_of
    moves = tasks.kind[task_of] == TASK_ORDER.index(TaskKind.TRANSFER)
    source, written = tasks.rank[task_of[moves]], writes.items[moves]
    target, size = values.rank[written], sizes[written]
    far = node[source] != node[target]
    np.add.at(sent, source, size)
    np.add.at(received, target, size)
    np.add.at(far_sent, source[far], size[far])
    np.add.at(far_received, target[far], size[far])
    shared = np.flatnonzero(tasks.kind == TASK_ORDER.index(TaskKind.COLLECTIVE)).tolist()
    for task in shared:
        origin, goal, moved = moves_of(program, task).T
        apart = node[origin] != node[goal]
        np.add.at(sent, origin, sizes[moved])
        np.add.at(received, goal, sizes[moved])
        np.add.at(far_sent, origin[apart], sizes[moved[apart]])
        np.add.at(far_received, goal[apart], sizes[moved[apart]])
    np.add.at(load, tasks.rank[tasks.tile.row_of], program.blocks.weight[tasks.tile.items])
    memory = np.zeros(ranks, dtype=np.int64)
    np.add.at(memory, program.buffers.rank, program.buffers.bytes)
    return Account(load, sent, received, far_sent, far_received, memory)


def moves_of(program: Program, task: int) -> Ints:
    """What `collective_moves` says of a collective, from the columns: int64, shape (moves, 3)."""
    known = program.moves.get(task)
    if known is None:
        known = program.moves[task] = _moves_of(program, task)
    return known


def _moves_of(program: Program, task: int) -> Ints:
    v = program.values
    reads, writes = program.tasks.reads.row(task), program.tasks.writes.row(task)
    exact = COLLECTIVE_ORDER[int(program.tasks.op[task])] is CollectiveOp.REDUCE_SCATTER
    plain = None if exact else _whole_moves(program, task)
    if plain is not None:
        return plain
    columns = (v.tensor, v.chunk, v.row_start, v.row_stop, v.head_start, v.head_stop)
    index = np.array([*reads, *writes], dtype=np.int64)
    extent = list(zip(*(c[index].tolist() for c in columns), strict=True))
    rank, wide = v.rank[index].tolist(), v.wide[index].tolist()
    found: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for at in range(len(reads)):
        found[extent[at] if exact else extent[at][:2]].append(at)
    moves: list[tuple[int, int, int]] = []
    for at, write in enumerate(writes, len(reads)):
        if exact:
            moves += [
                (rank[part], rank[at], reads[part])
                for part in found[extent[at]]
                if rank[part] != rank[at]
            ]
            continue
        _, _, r0, r1, h0, h1 = extent[at]
        holders = [
            part
            for part in found[extent[at][:2]]
            if extent[part][2] <= r0 and r1 <= extent[part][3] and wide[part] == wide[at]
            and extent[part][4] <= h0 and h1 <= extent[part][5]
        ]  # fmt: skip
        if len(holders) > 1:
            cover = v.cover.row(write)
            holders = [part for part in holders if v.cover.row(reads[part]) == cover]
        origins = [rank[part] for part in holders]
        if rank[at] not in origins:
            moves.append((origins[0], rank[at], write))
    return np.array(moves, dtype=np.int64).reshape(-1, 3)


def _whole_moves(program: Program, task: int) -> Ints | None:
    """The moves of a collective that copies, where it reads no head of a chunk twice."""
    v, tasks = program.values, program.tasks
    read, write = (
        ragged.items[ragged.offsets[task] : ragged.offsets[task + 1]]
        for ragged in (tasks.reads, tasks.writes)
    )
    key = line = v.tensor * (int(v.chunk.max(initial=0)) + 1) + v.chunk
    order = np.lexsort((v.head_start[read], line[read]))
    alike = line[read][order][1:] == line[read][order][:-1]
    if alike.any():
        # Pieces of a chunk side by side are told apart by their first heads.
        if (alike & (v.head_start[read][order][1:] < v.head_stop[read][order][:-1])).any():
            return None
        key = line * (int(v.head_start.max()) + 1) + v.head_start
    known = key[read][order]
    if not len(known):
        return None
    source = read[order[np.minimum(np.searchsorted(known, key[write]), len(known) - 1)]]
    holds = (line[source] == line[write]) & (v.wide[source] == v.wide[write])
    holds &= (v.row_start[source] <= v.row_start[write]) & (v.row_stop[write] <= v.row_stop[source])
    holds &= v.head_start[source] <= v.head_start[write]
    holds &= v.head_stop[write] <= v.head_stop[source]
    if not holds.all():
        return None
    away = v.rank[source] != v.rank[write]
    moves: Ints = np.stack((v.rank[source], v.rank[write], write), axis=1)[away]
    return moves


def collective_moves(values: Mapping[int, Value], task: Collective) -> list[tuple[int, int, int]]:
    """(source rank, target rank, value moved) for each piece that is sent point to point.

    A copy goes from its first holder straight to the receiver; the value moved is the one
    written. A reduce-scatter sends each part to the rank of the value it belongs to; the value
    moved is the part.
    """
    moves = []
    by_chunk = reads_by_chunk(values, task.reads)
    for number in task.writes:
        target = values[number]
        reads = by_chunk[target.tensor, target.chunk]
        if task.op is CollectiveOp.REDUCE_SCATTER:
            moves += [
                (values[read].rank, target.rank, read)
                for read in _same_extent(values, reads, target)
                if values[read].rank != target.rank
            ]
            continue
        holders = [values[read].rank for read in reads if values[read].holds(target)]
        if target.rank not in holders:
            moves.append((holders[0], target.rank, number))
    return moves


def reads_by_chunk(
    values: Mapping[int, Value] | Sequence[Value], reads: Iterable[int]
) -> defaultdict[tuple[Tensor, int], list[int]]:
    """The values of `reads` by what they hold rows of: a copy or a sum looks among these alone."""
    found: defaultdict[tuple[Tensor, int], list[int]] = defaultdict(list)
    for read in reads:
        found[values[read].tensor, values[read].chunk].append(read)
    return found


def parts_by_target(values: Mapping[int, Value], task: Collective) -> dict[int, list[int]]:
    """`parts_of` every value that a reduce-scatter writes."""
    by_chunk = reads_by_chunk(values, task.reads)
    return {
        number: _same_extent(
            values, by_chunk[values[number].tensor, values[number].chunk], values[number]
        )
        for number in task.writes
    }


def parts_of(values: Mapping[int, Value], task: Collective, target: Value) -> list[int]:
    """The values that a reduce-scatter merges into `target`."""
    return _same_extent(values, task.reads, target)


def _same_extent(values: Mapping[int, Value], reads: Iterable[int], target: Value) -> list[int]:
    return [
        read
        for read in reads
        if values[read].tensor == target.tensor
        and values[read].chunk == target.chunk
        and values[read].row_start == target.row_start
        and values[read].row_stop == target.row_stop
        and values[read].head_start == target.head_start
        and values[read].head_stop == target.head_stop
    ]
