"""Holds one pass of a plan as columns: blocks, values, tasks, and the streams that order them.

Tasks are numbered in an order that every rank can follow: a task depends on lower numbers only,
and every stream's tasks ascend. A rank that runs its own tasks in that order, sending without
waiting, cannot deadlock: of all tasks not yet run, the lowest can always go on.

    note: the same seven blocks, two readings (rows = query chunks, columns = key chunks)

        mask          rank of each block       what a `Transfer` carries for rank 1
        x . . .       0 . . .                  k,v of chunk 0   (rank 0 -> rank 1)
        x x . .       0 1 . .
        x . x .       1 . 1 .                  q of chunk 2     (rank 2 -> rank 1)
        x . . x       2 . . 3                  o,lse of chunk 2 (rank 1 -> rank 2), then a `Merge`
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ultraattn.chunks import Ints
from ultraattn.enums import StrEnum
from ultraattn.masks.grid import KIND_ORDER, BlockKind
from ultraattn.plans.columns import ByContent, Ragged
from ultraattn.plans.tensors import TENSOR_ORDER, Tensor


class TaskKind(StrEnum):
    """What a task does."""

    COMPUTE = "compute"
    TRANSFER = "transfer"
    COLLECTIVE = "collective"
    MERGE = "merge"
    LOCAL = "local"


class LocalOp(StrEnum):
    """Work on one rank besides attention itself."""

    FILL = "fill"
    """O = 0, LSE = -inf (or a zero gradient) for rows that no block covers."""
    DELTA = "delta"
    """delta = rowsum(dO * O), from a rank's own dO and O."""
    PACK = "pack"
    """Copies pieces of values side by side, to be sent as one."""
    GATHER = "gather"
    """Joins pieces of a chunk into one value."""
    CAST = "cast"
    """Changes between the plan's dtype and the accumulation dtype."""


class CollectiveOp(StrEnum):
    """A collective over the ranks that its values name."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"


class StreamKind(StrEnum):
    """What does one task at a time on a rank."""

    COMPUTE = "compute"
    SEND = "send"
    RECEIVE = "receive"
    SEND_BETWEEN_NODES = "send_between_nodes"
    RECEIVE_BETWEEN_NODES = "receive_between_nodes"


TASK_ORDER = tuple(TaskKind)
LOCAL_ORDER = tuple(LocalOp)
COLLECTIVE_ORDER = tuple(CollectiveOp)
STREAM_ORDER = tuple(StreamKind)


class Block(NamedTuple):
    """The smallest piece of work: (query chunk, key chunk, head range). View of a row."""

    q_chunk: int
    kv_chunk: int
    head_start: int
    head_stop: int
    kind: BlockKind
    lo: int
    hi: int
    weight: int
    """Visible (query, key) pairs times heads."""


class Value(NamedTuple):
    """A piece of a tensor at a place. View of a row.

    Rows count within the chunk; heads are key/value heads for K, V, dK, dV. `wide` values are
    kept in the accumulation dtype. `buffer` is the workspace buffer it stands in, or -1 for the
    caller's own tensors. `cover` names the blocks that a partial result sums over.
    """

    tensor: Tensor
    chunk: int
    row_start: int
    row_stop: int
    head_start: int
    head_stop: int
    rank: int
    wide: bool = False
    buffer: int = -1
    cover: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        """Rows it holds."""
        return self.row_stop - self.row_start

    @property
    def heads(self) -> int:
        """Heads it holds."""
        return self.head_stop - self.head_start

    def holds(self, other: Value) -> bool:
        """Whether it could be the source from which `other` is copied."""
        return (
            self.tensor == other.tensor
            and self.chunk == other.chunk
            and self.wide == other.wide
            and self.contains(other)
            and self.cover == other.cover
        )

    def contains(self, other: Value) -> bool:
        """Whether its rows and heads are those of `other`, or more."""
        return (
            self.row_start <= other.row_start
            and other.row_stop <= self.row_stop
            and self.head_start <= other.head_start
            and other.head_stop <= self.head_stop
        )

    def place(self) -> str:
        """For messages: ``o of chunk 3 rows 0:128 heads 0:8 on rank 2``."""
        return (
            f"{self.tensor} of chunk {self.chunk} rows {self.row_start}:{self.row_stop} "
            f"heads {self.head_start}:{self.head_stop} on rank {self.rank}"
        )


@dataclass(frozen=True)
class Task:
    """A node of the dependency graph: it reads values and writes values. View of a row."""

    index: int
    rank: int
    """The rank that runs it; the source of a transfer; the lowest member of a collective."""
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    depends_on: tuple[int, ...]

    @property
    def kind(self) -> TaskKind:
        """Its kind, as stored."""
        return TaskKind(type(self).__name__.lower())


@dataclass(frozen=True)
class Compute(Task):
    """Inputs on a rank to partial results on it: the blocks of one kernel launch."""

    tile: tuple[int, ...]


@dataclass(frozen=True)
class Transfer(Task):
    """Values, whole or in row ranges, from a rank to one or more others."""


@dataclass(frozen=True)
class Collective(Task):
    """Values of all members to values of all members."""

    op: CollectiveOp


@dataclass(frozen=True)
class Merge(Task):
    """Partial results with disjoint covers into one."""


@dataclass(frozen=True)
class Local(Task):
    """Fill, delta, pack, gather, cast."""

    op: LocalOp


@dataclass(frozen=True)
class Stream:
    """What does one task at a time, and its tasks in order. View of a row."""

    rank: int
    kind: StreamKind
    tasks: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class BlockColumns(ByContent):
    """The visible blocks of a pass."""

    q_chunk: Ints
    kv_chunk: Ints
    head_start: Ints
    head_stop: Ints
    kind: Ints
    lo: Ints
    hi: Ints
    weight: Ints


@dataclass(frozen=True, eq=False)
class ValueColumns(ByContent):
    """The values of a pass."""

    tensor: Ints
    chunk: Ints
    row_start: Ints
    row_stop: Ints
    head_start: Ints
    head_stop: Ints
    rank: Ints
    wide: Ints
    buffer: Ints
    cover: Ragged


@dataclass(frozen=True, eq=False)
class TaskColumns(ByContent):
    """The tasks of a pass."""

    kind: Ints
    op: Ints
    """Code of `LocalOp` or `CollectiveOp`; -1 for other kinds."""
    rank: Ints
    reads: Ragged
    writes: Ragged
    depends_on: Ragged
    tile: Ragged


@dataclass(frozen=True, eq=False)
class StreamColumns(ByContent):
    """The streams of a pass."""

    rank: Ints
    kind: Ints
    tasks: Ragged


@dataclass(frozen=True, eq=False)
class BufferColumns(ByContent):
    """The workspace buffers of a pass; values that share one follow each other in time."""

    rank: Ints
    bytes: Ints
    """For one batch entry."""


@dataclass(frozen=True, eq=False)
class Program(ByContent):
    """One pass of a plan."""

    blocks: BlockColumns
    values: ValueColumns
    tasks: TaskColumns
    streams: StreamColumns
    buffers: BufferColumns

    @cached_property
    def block_views(self) -> tuple[Block, ...]:
        """Every block."""
        c = self.blocks
        rows = zip(
            c.q_chunk.tolist(), c.kv_chunk.tolist(), c.head_start.tolist(), c.head_stop.tolist(),
            c.kind.tolist(), c.lo.tolist(), c.hi.tolist(), c.weight.tolist(), strict=True,
        )  # fmt: skip
        return tuple(
            Block(q, k, a, b, KIND_ORDER[kind], lo, hi, w) for q, k, a, b, kind, lo, hi, w in rows
        )

    @cached_property
    def value_views(self) -> tuple[Value, ...]:
        """Every value."""
        c = self.values
        rows = zip(
            c.tensor.tolist(), c.chunk.tolist(), c.row_start.tolist(), c.row_stop.tolist(),
            c.head_start.tolist(), c.head_stop.tolist(), c.rank.tolist(), c.wide.tolist(),
            c.buffer.tolist(), c.cover.rows(), strict=True,
        )  # fmt: skip
        return tuple(
            Value(TENSOR_ORDER[t], ch, r0, r1, h0, h1, rank, bool(wide), buf, tuple(cover))
            for t, ch, r0, r1, h0, h1, rank, wide, buf, cover in rows
        )

    @cached_property
    def task_views(self) -> tuple[Task, ...]:
        """Every task."""
        c = self.tasks
        rows = zip(
            c.kind.tolist(), c.op.tolist(), c.rank.tolist(), c.reads.rows(), c.writes.rows(),
            c.depends_on.rows(), c.tile.rows(), strict=True,
        )  # fmt: skip
        return tuple(
            _task(index, TASK_ORDER[kind], op, rank, reads, writes, deps, tile)
            for index, (kind, op, rank, reads, writes, deps, tile) in enumerate(rows)
        )

    @cached_property
    def stream_views(self) -> tuple[Stream, ...]:
        """Every stream."""
        c = self.streams
        rows = zip(c.rank.tolist(), c.kind.tolist(), c.tasks.rows(), strict=True)
        return tuple(Stream(rank, STREAM_ORDER[kind], tuple(tasks)) for rank, kind, tasks in rows)

    @cached_property
    def producer(self) -> Ints:
        """For each value, the first task that writes it, or -1 for the caller's tensors."""
        producer = np.full(len(self.values.rank), -1, dtype=np.int64)
        # Backwards, so that the first to write has the last word.
        producer[self.tasks.writes.items[::-1]] = self.tasks.writes.row_of[::-1]
        return producer

    @cached_property
    def producers(self) -> tuple[int, ...]:
        """`producer` as plain numbers."""
        return tuple(self.producer.tolist())

    @cached_property
    def rank_of_block(self) -> Ints:
        """The rank that computes each block: int64, (blocks,)."""
        tile = self.tasks.tile
        ranks = np.full(len(self.blocks.kind), -1, dtype=np.int64)
        ranks[tile.items] = self.tasks.rank[tile.row_of]
        return ranks

    @cached_property
    def moves(self) -> dict[int, Ints]:
        """What each collective moves, as far as `plans.account.moves_of` was asked."""
        return {}

    def ranks_of(self, task: Task) -> Iterator[int]:
        """The ranks that take part in a task, each once: the source first."""
        seen = {task.rank}
        yield task.rank
        for value in (*task.reads, *task.writes):
            rank = int(self.values.rank[value])
            if rank not in seen:
                seen.add(rank)
                yield rank


def _task(
    index: int,
    kind: TaskKind,
    op: int,
    rank: int,
    reads: list[int],
    writes: list[int],
    deps: list[int],
    tile: list[int],
) -> Task:
    base = (index, rank, tuple(reads), tuple(writes), tuple(deps))
    if kind is TaskKind.COMPUTE:
        return Compute(*base, tile=tuple(tile))
    if kind is TaskKind.TRANSFER:
        return Transfer(*base)
    if kind is TaskKind.MERGE:
        return Merge(*base)
    if kind is TaskKind.COLLECTIVE:
        return Collective(*base, op=COLLECTIVE_ORDER[op])
    return Local(*base, op=LOCAL_ORDER[op])
