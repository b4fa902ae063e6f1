"""Turns blocks, values and tasks, added in any order, into the columns of a program."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ultraattn.chunks import Ints
from ultraattn.masks.grid import BlockKind
from ultraattn.plans.columns import Ragged, column
from ultraattn.plans.problem import Problem
from ultraattn.plans.program import (
    COLLECTIVE_ORDER,
    LOCAL_ORDER,
    STREAM_ORDER,
    TASK_ORDER,
    Block,
    BlockColumns,
    BufferColumns,
    CollectiveOp,
    LocalOp,
    Program,
    StreamColumns,
    StreamKind,
    TaskColumns,
    TaskKind,
    Value,
    ValueColumns,
)
from ultraattn.plans.tensors import Tensor

CODES = {kind: code for code, kind in enumerate(TASK_ORDER)}
STREAM_CODES = {kind: code for code, kind in enumerate(STREAM_ORDER)}
SENDS, RECEIVES = (
    np.array([STREAM_CODES[kind] for kind in kinds], dtype=np.int64)
    for kinds in (
        (StreamKind.SEND, StreamKind.SEND_BETWEEN_NODES),
        (StreamKind.RECEIVE, StreamKind.RECEIVE_BETWEEN_NODES),
    )
)
"""Streams of both ends of a message, inside a node and between nodes."""

Key = tuple[int, ...]
"""Where a task stands in the order of issue; ties keep the order of addition."""


@dataclasses.dataclass(slots=True)
class _Draft:
    key: Key
    kind: TaskKind
    op: int
    rank: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    after: tuple[int, ...]
    tile: tuple[int, ...]


class ProgramBuilder:
    """Collects the parts of one pass; `finish` numbers the tasks and fixes streams and buffers.

    Dependencies on the producers of what a task reads are added by `finish`; `after` adds others.
    Every task gets a `key`: tasks are issued in ascending key order, on every stream alike.
    """

    def __init__(self, problem: Problem, nodes: Sequence[int]) -> None:
        """`nodes` gives each rank's node: transfers between nodes use streams of their own."""
        self._problem = problem
        self._nodes = tuple(nodes)
        self.blocks: list[Block] = []
        self.values: list[Value] = []
        self._drafts: list[_Draft] = []

    def block(self, block: Block) -> int:
        """Adds a visible block; returns its number."""
        self.blocks.append(block)
        return len(self.blocks) - 1

    def value(self, value: Value) -> int:
        """Adds a value; returns its number. Its buffer is chosen by `finish`."""
        self.values.append(value)
        return len(self.values) - 1

    def copy(self, value: int, rank: int, **changes: Any) -> int:
        """Adds the value that `value` becomes on another rank, whole or in part."""
        v = self.values[value]
        if changes:
            return self.value(v._replace(rank=rank, **changes))
        # Spelt out: programs of many ranks copy tens of thousands of values.
        return self.value(Value(v[0], v[1], v[2], v[3], v[4], v[5], rank, v[7], v[8], v[9]))

    def part(self, value: int, rank: int, heads: tuple[int, int]) -> int:
        """Adds some heads of `value`, all its rows, on another rank."""
        v = self.values[value]
        return self.value(Value(v[0], v[1], v[2], v[3], heads[0], heads[1], rank, v[7], v[8], v[9]))

    def compute(
        self, rank: int, tile: Iterable[int], reads: Iterable[int], writes: Iterable[int], key: Key
    ) -> int:
        """Adds one kernel launch over the blocks `tile`."""
        return self._add(key, TaskKind.COMPUTE, -1, rank, reads, writes, tile=tuple(tile))

    def transfer(
        self,
        source: int,
        reads: Iterable[int],
        writes: Iterable[int],
        key: Key,
        after: Iterable[int] = (),
    ) -> int:
        """Adds one message (to each target) that carries `reads` and arrives as `writes`."""
        return self._add(key, TaskKind.TRANSFER, -1, source, reads, writes, after=tuple(after))

    def collective(
        self, op: CollectiveOp, reads: Iterable[int], writes: Iterable[int], key: Key
    ) -> int:
        """Adds a collective over the ranks of its values."""
        reads, writes = tuple(reads), tuple(writes)
        rank = min(self.values[value].rank for value in (*reads, *writes))
        code = COLLECTIVE_ORDER.index(op)
        return self._add(key, TaskKind.COLLECTIVE, code, rank, reads, writes)

    def merge(self, rank: int, reads: Iterable[int], writes: Iterable[int], key: Key) -> int:
        """Adds a merge of partial results."""
        return self._add(key, TaskKind.MERGE, -1, rank, reads, writes)

    def local(
        self, op: LocalOp, rank: int, reads: Iterable[int], writes: Iterable[int], key: Key
    ) -> int:
        """Adds local work."""
        return self._add(key, TaskKind.LOCAL, LOCAL_ORDER.index(op), rank, reads, writes)

    def _add(
        self,
        key: Key,
        kind: TaskKind,
        op: int,
        rank: int,
        reads: Iterable[int],
        writes: Iterable[int],
        after: tuple[int, ...] = (),
        tile: tuple[int, ...] = (),
    ) -> int:
        draft = _Draft(key, kind, op, rank, tuple(reads), tuple(writes), after, tile)
        self._drafts.append(draft)
        return len(self._drafts) - 1

    def finish(self, outputs: frozenset[int]) -> Program:
        """The program. `outputs` are values that stand in the caller's output tensors."""
        order = sorted(range(len(self._drafts)), key=[d.key for d in self._drafts].__getitem__)
        drafts = [self._drafts[i] for i in order]
        reads, writes = Ragged.of([d.reads for d in drafts]), Ragged.of([d.writes for d in drafts])
        kind, rank = column(CODES[d.kind] for d in drafts), column(d.rank for d in drafts)
        producer = self._producers(writes)
        values = value_columns(self.values, [])
        buffers, buffer_of = self._buffers(values, producer, outputs)
        return Program(
            blocks=block_columns(self.blocks),
            values=dataclasses.replace(values, buffer=buffer_of),
            tasks=TaskColumns(
                kind=kind,
                op=column(d.op for d in drafts),
                rank=rank,
                reads=reads,
                writes=writes,
                depends_on=self._depends_on(reads, producer, order),
                tile=Ragged.of([d.tile for d in drafts]),
            ),
            streams=stream_columns(
                stream_pairs(kind, rank, reads, writes, values.rank, self._nodes), len(drafts)
            ),
            buffers=buffers,
        )

    def _producers(self, writes: Ragged) -> Ints:
        """For each value, the first task that writes it, or -1."""
        producer = np.full(len(self.values), -1, dtype=np.int64)
        # Backwards, so that the first to write has the last word.
        producer[writes.items[::-1]] = writes.row_of[::-1]
        return producer

    def _depends_on(self, reads: Ragged, producer: Ints, order: Sequence[int]) -> Ragged:
        """Of each task, the producers of what it reads and what it was told to follow."""
        count = len(order)
        before, task = producer[reads.items], reads.row_of
        made = before >= 0
        pairs = [task[made] * count + before[made]]
        after = [(i, other) for i, old in enumerate(order) for other in self._drafts[old].after]
        if after:
            number = np.empty(count, dtype=np.int64)
            number[np.array(order, dtype=np.int64)] = np.arange(count)
            which, others = np.array(after, dtype=np.int64).T
            pairs.append(which * count + number[others])
        return Ragged.of_pairs(np.unique(np.concatenate(pairs)), count, count)

    def _buffers(
        self, values: ValueColumns, producer: Ints, outputs: frozenset[int]
    ) -> tuple[BufferColumns, Ints]:
        """Every value that a task writes, other than the outputs, gets a buffer of its own."""
        kept = producer >= 0
        kept[np.fromiter(outputs, dtype=np.int64, count=len(outputs))] = False
        buffer_of = np.where(kept, np.cumsum(kept) - 1, -1)
        area = (values.row_stop - values.row_start) * (values.head_stop - values.head_start)
        sizes = area * self._problem.widths.table[values.tensor, values.wide]
        return BufferColumns(column(values.rank[kept]), column(sizes[kept])), column(buffer_of)


def stream_pairs(
    kind: Ints, rank: Ints, reads: Ragged, writes: Ragged, rank_of: Ints, nodes: Sequence[int]
) -> Ints:
    """What `stream_keys` says of all tasks of a program.

    Returns ``(stream rank * kinds of streams + stream kind) * tasks + task``, ascending: int64.

    Args:
        kind: code of each task's kind.
        rank: of each task.
        reads: values that each task reads.
        writes: values that each task writes.
        rank_of: rank of each value.
        nodes: node of each rank.
    """
    tasks, kinds = max(1, len(kind)), len(STREAM_ORDER)
    moves, shared = (kind == CODES[k] for k in (TaskKind.TRANSFER, TaskKind.COLLECTIVE))
    alone = np.flatnonzero(~(moves | shared))
    stream = [rank[alone] * kinds + STREAM_CODES[StreamKind.COMPUTE]]
    task = [alone]
    sent = moves[writes.row_of]
    which, target = writes.row_of[sent], rank_of[writes.items[sent]]
    source, node = rank[which], np.asarray(nodes, dtype=np.int64)
    far = (node[source] != node[target]).astype(np.int64)
    for end, links in ((source, SENDS), (target, RECEIVES)):
        stream.append(end * kinds + links[far])
        task.append(which)
    for index in np.flatnonzero(shared).tolist():
        read_ranks, write_ranks = (
            rank_of[ragged.items[ragged.offsets[index] : ragged.offsets[index + 1]]].tolist()
            for ragged in (reads, writes)
        )
        keys = stream_keys(TaskKind.COLLECTIVE, int(rank[index]), read_ranks, write_ranks, nodes)
        numbers = [where * kinds + STREAM_CODES[what] for where, what in keys]
        stream.append(np.array(numbers, dtype=np.int64))
        task.append(np.full(len(numbers), index, dtype=np.int64))
    return np.unique(np.concatenate(stream) * tasks + np.concatenate(task))


def stream_columns(pairs: Ints, tasks: int) -> StreamColumns:
    """The streams that `stream_pairs` gives, each with its tasks in ascending order."""
    base, kinds = max(1, tasks), len(STREAM_ORDER)
    present, row = np.unique(pairs // base, return_inverse=True)
    return StreamColumns(
        rank=column(present // kinds),
        kind=column(present % kinds),
        tasks=Ragged.of_pairs(row * base + pairs % base, len(present), base),
    )


def stream_keys(
    kind: TaskKind,
    rank: int,
    read_ranks: Iterable[int],
    write_ranks: Iterable[int],
    nodes: Sequence[int],
) -> list[tuple[int, StreamKind]]:
    """The streams that a task occupies, each once, in order of rank.

    A transfer occupies the send stream of its source and the receive stream of each target, of
    the link class (inside a node, or between nodes) that it crosses; a collective occupies both
    streams of each member.
    """
    if kind is TaskKind.TRANSFER:
        found = set()
        for target in write_ranks:
            found.update(_link(rank, target, nodes))
        return sorted(found)
    if kind is TaskKind.COLLECTIVE:
        members = sorted({*read_ranks, *write_ranks})
        crowd = Counter(nodes[member] for member in members)
        found = set()
        for member in members:
            alike = crowd[nodes[member]]
            if alike > 1:
                found.update((member, link) for link in (StreamKind.SEND, StreamKind.RECEIVE))
            if alike < len(members):
                found.add((member, StreamKind.SEND_BETWEEN_NODES))
                found.add((member, StreamKind.RECEIVE_BETWEEN_NODES))
        return sorted(found)
    return [(rank, StreamKind.COMPUTE)]


def _link(source: int, target: int, nodes: Sequence[int]) -> list[tuple[int, StreamKind]]:
    if nodes[source] == nodes[target]:
        return [(source, StreamKind.SEND), (target, StreamKind.RECEIVE)]
    return [
        (source, StreamKind.SEND_BETWEEN_NODES),
        (target, StreamKind.RECEIVE_BETWEEN_NODES),
    ]


def block_columns(blocks: Sequence[Block]) -> BlockColumns:
    """Blocks as columns."""
    if not blocks:
        return BlockColumns(*(column(()) for _ in range(8)))
    codes = {kind: kind.code for kind in BlockKind}
    q, kv, start, stop, kind, lo, hi, weight = zip(*blocks, strict=True)
    kinds = [codes[each] for each in kind]
    return BlockColumns(*(column(c) for c in (q, kv, start, stop, kinds, lo, hi, weight)))


def value_columns(values: Sequence[Value], buffer_of: Sequence[int]) -> ValueColumns:
    """Values as columns; `buffer_of` gives each its buffer."""
    rows = values or (Value(Tensor.Q, 0, 0, 0, 0, 0, 0),)  # One row to tell the columns apart.
    tensor, chunk, r0, r1, h0, h1, rank, wide, _, cover = zip(*rows, strict=True)
    codes = [each.code for each in tensor]
    a, b, c, d, e, f, g, h = (
        column(each[: len(values)]) for each in (codes, chunk, r0, r1, h0, h1, rank, wide)
    )
    return ValueColumns(a, b, c, d, e, f, g, h, column(buffer_of), Ragged.of(cover[: len(values)]))
