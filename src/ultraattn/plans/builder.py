"""Turns blocks, values and tasks, added in any order, into the columns of a program."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

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
        return self.value(self.values[value]._replace(rank=rank, **changes))

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
        order = sorted(range(len(self._drafts)), key=lambda i: (self._drafts[i].key, i))
        number = {draft: index for index, draft in enumerate(order)}
        drafts = [self._drafts[i] for i in order]
        producer: dict[int, int] = {}
        for index, draft in enumerate(drafts):
            for value in draft.writes:
                producer.setdefault(value, index)
        depends_on = [
            sorted(
                {producer[value] for value in draft.reads if value in producer}
                | {number[other] for other in draft.after}
            )
            for draft in drafts
        ]
        buffers, buffer_of = self._buffers(producer, outputs)
        return Program(
            blocks=block_columns(self.blocks),
            values=value_columns(self.values, buffer_of),
            tasks=TaskColumns(
                kind=column(TASK_ORDER.index(d.kind) for d in drafts),
                op=column(d.op for d in drafts),
                rank=column(d.rank for d in drafts),
                reads=Ragged.of([d.reads for d in drafts]),
                writes=Ragged.of([d.writes for d in drafts]),
                depends_on=Ragged.of(depends_on),
                tile=Ragged.of([d.tile for d in drafts]),
            ),
            streams=self._streams(drafts),
            buffers=buffers,
        )

    def _buffers(
        self, producer: dict[int, int], outputs: frozenset[int]
    ) -> tuple[BufferColumns, list[int]]:
        """Every value that a task writes, other than the outputs, gets a buffer of its own."""
        widths = self._problem.widths
        ranks: list[int] = []
        sizes: list[int] = []
        buffer_of = [-1] * len(self.values)
        for index, value in enumerate(self.values):
            if index in producer and index not in outputs:
                buffer_of[index] = len(ranks)
                ranks.append(value.rank)
                row = widths.row_bytes(value.tensor, value.wide)
                sizes.append(value.rows * value.heads * row)
        return BufferColumns(column(ranks), column(sizes)), buffer_of

    def _streams(self, drafts: Sequence[_Draft]) -> StreamColumns:
        tasks: dict[tuple[int, int], list[int]] = {}
        rank_of = [value.rank for value in self.values]
        for index, draft in enumerate(drafts):
            for rank, kind in stream_keys(
                draft.kind,
                draft.rank,
                [rank_of[v] for v in draft.reads],
                [rank_of[v] for v in draft.writes],
                self._nodes,
            ):
                tasks.setdefault((rank, STREAM_ORDER.index(kind)), []).append(index)
        keys = sorted(tasks)
        return StreamColumns(
            rank=column(rank for rank, _ in keys),
            kind=column(kind for _, kind in keys),
            tasks=Ragged.of([tasks[key] for key in keys]),
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
        found = {
            key
            for source in members
            for target in members
            if source != target
            for key in _link(source, target, nodes)
        }
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
    codes = {kind: kind.code for kind in BlockKind}
    return BlockColumns(
        q_chunk=column(b.q_chunk for b in blocks),
        kv_chunk=column(b.kv_chunk for b in blocks),
        head_start=column(b.head_start for b in blocks),
        head_stop=column(b.head_stop for b in blocks),
        kind=column(codes[b.kind] for b in blocks),
        lo=column(b.lo for b in blocks),
        hi=column(b.hi for b in blocks),
        weight=column(b.weight for b in blocks),
    )


def value_columns(values: Sequence[Value], buffer_of: Sequence[int]) -> ValueColumns:
    """Values as columns; `buffer_of` gives each its buffer."""
    return ValueColumns(
        tensor=column(v.tensor.code for v in values),
        chunk=column(v.chunk for v in values),
        row_start=column(v.row_start for v in values),
        row_stop=column(v.row_stop for v in values),
        head_start=column(v.head_start for v in values),
        head_stop=column(v.head_stop for v in values),
        rank=column(v.rank for v in values),
        wide=column(int(v.wide) for v in values),
        buffer=column(buffer_of),
        cover=Ragged.of([v.cover for v in values]),
    )
