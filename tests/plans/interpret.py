"""Runs a program on paper, in any order that its dependencies and streams allow.

Shares no code with the check. An input is the identity of its tokens; a partial result is, for
each row and head, how often each block has been added to it. A buffer holds one value at a time.
"""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import numpy as np
import numpy.typing as npt

from ultraattn.plans import (
    Collective,
    CollectiveOp,
    Compute,
    LocalOp,
    Merge,
    Pass,
    Plan,
    Program,
    Task,
    TaskKind,
    Tensor,
    Transfer,
    Value,
)

Counts = npt.NDArray[np.int64]


class UnsoundError(Exception):
    """The program loses, doubles, misplaces or awaits something for ever."""


class Interpreter:
    def __init__(self, plan: Plan, pass_: Pass, program: Program, seed: int) -> None:
        self.plan, self.pass_, self.program = plan, pass_, program
        self.random = random.Random(seed)
        self.values = program.value_views
        self.blocks = program.block_views
        self.held: dict[int, Counts] = {}
        self.tenant: dict[int, int] = {}
        self.results: dict[tuple[Tensor, int], Counts] = {}
        self.written = {number for task in program.task_views for number in task.writes}

    def run(self) -> None:
        for task in self.order():
            self.step(task)
        for tensor in self.pass_.results:
            layout = self.plan.kv_layout if tensor.by_key else self.plan.q_layout
            for chunk, owner in enumerate(layout.owners):
                self.expect(tensor, chunk, owner)

    def order(self) -> list[Task]:
        tasks, streams = self.program.task_views, self.program.stream_views
        queues = [list(stream.tasks) for stream in streams]
        on: dict[int, list[int]] = defaultdict(list)
        for number, queue in enumerate(queues):
            for task in queue:
                on[task].append(number)
        done: set[int] = set()
        out = []
        while len(done) < len(tasks):
            ready = [
                task
                for task in tasks
                if task.index not in done
                and done.issuperset(task.depends_on)
                and all(queues[stream][0] == task.index for stream in on[task.index])
            ]
            if not ready:
                raise UnsoundError("nothing can go on")
            task = self.random.choice(ready)
            for stream in on[task.index]:
                queues[stream].pop(0)
            done.add(task.index)
            out.append(task)
        return out

    # Values

    def shape(self, value: Value) -> tuple[int, int]:
        return value.rows, value.heads

    def layout_of(self, value: Value) -> Any:
        return self.plan.kv_layout if value.tensor.by_key else self.plan.q_layout

    def identity(self, value: Value) -> Counts:
        """Distinct numbers for the tokens and heads that an input holds."""
        tokens = self.layout_of(value).chunks[value.chunk].tokens()
        heads = np.arange(value.head_start, value.head_stop)
        rows = tokens[value.row_start : value.row_stop]
        return (rows[:, None] * 1000 + heads[None] + 10**8 * (1 + value.tensor.code))[..., None]

    def read(self, number: int, rank: int) -> Counts:
        value = self.values[number]
        if value.rank != rank:
            raise UnsoundError("a value of another rank")
        if number in self.held:
            return self.held[number]
        if (
            number in self.written
            or value.tensor not in self.pass_.inputs
            or self.layout_of(value).owners[value.chunk] != rank
        ):
            raise UnsoundError("a value that is not there")
        return self.identity(value)

    def write(self, number: int, content: Counts) -> None:
        value = self.values[number]
        if content.shape[:2] != self.shape(value):
            raise UnsoundError("a value of another shape")
        if value.buffer < 0:
            if self.layout_of(value).owners[value.chunk] != value.rank:
                raise UnsoundError("a result on a rank that does not own it")
            whole = self.results.setdefault((value.tensor, value.chunk), self.blank(value))
            place = whole[value.row_start : value.row_stop, value.head_start : value.head_stop]
            if content.shape[2] != place.shape[2] or (place != -1).any():
                raise UnsoundError("a result that is written twice, or is none")
            place[...] = content
            return
        buffers = self.program.buffers
        row = self.plan.problem.widths.row_bytes(value.tensor, value.wide)
        if int(buffers.rank[value.buffer]) != value.rank:
            raise UnsoundError("a buffer of another rank")
        if int(buffers.bytes[value.buffer]) < value.rows * value.heads * row:
            raise UnsoundError("a buffer that is too small")
        self.held.pop(self.tenant.get(value.buffer, -1), None)
        self.tenant[value.buffer] = number
        self.held[number] = content

    def blank(self, value: Value) -> Counts:
        rows = len(self.layout_of(value).chunks[value.chunk])
        heads = self.plan.problem.heads_of(value.tensor)
        return np.full((rows, heads, len(self.blocks)), -1, dtype=np.int64)

    def assembled(self, task: Task, rank: int, wanted: Value, add: bool) -> Counts:
        """What the values read give of a region: laid side by side, or added up."""
        depth = len(self.blocks) if wanted.tensor in self.pass_.results else 1
        whole = np.full((wanted.rows, wanted.heads, depth), 0 if add else -1, dtype=np.int64)
        for number in task.reads:
            v = self.values[number]
            if (v.tensor, v.chunk) != (wanted.tensor, wanted.chunk) or v.rank != rank:
                continue
            rows = max(v.row_start, wanted.row_start), min(v.row_stop, wanted.row_stop)
            heads = max(v.head_start, wanted.head_start), min(v.head_stop, wanted.head_stop)
            if rows[0] >= rows[1] or heads[0] >= heads[1]:
                continue
            to = whole[
                rows[0] - wanted.row_start : rows[1] - wanted.row_start,
                heads[0] - wanted.head_start : heads[1] - wanted.head_start,
            ]
            source = self.read(number, rank)[
                rows[0] - v.row_start : rows[1] - v.row_start,
                heads[0] - v.head_start : heads[1] - v.head_start,
            ]
            to[...] = to + source if add else source
        return whole

    # Tasks

    def step(self, task: Task) -> None:
        if isinstance(task, Compute):
            self.compute(task)
        elif isinstance(task, (Transfer, Collective)):
            self.copy(task)
        else:
            for number in task.reads:
                self.read(number, task.rank)
            made = {number: self.local(task, self.values[number]) for number in task.writes}
            for number, content in made.items():
                if self.values[number].rank != task.rank:
                    raise UnsoundError("a result on another rank")
                self.write(number, content)

    def local(self, task: Task, value: Value) -> Counts:
        if isinstance(task, Merge):
            if value.tensor not in self.pass_.results:
                raise UnsoundError("a merge of inputs")
            return self.assembled(task, task.rank, value, add=True)
        op = getattr(task, "op", None)
        if op is LocalOp.FILL:
            return np.zeros((*self.shape(value), len(self.blocks)), dtype=np.int64)
        if op is LocalOp.DELTA:
            for tensor in (Tensor.DO, Tensor.O):
                self.need(task, tensor, value.chunk, value.head_start, value.head_stop)
            return self.identity(value)
        return self.assembled(task, task.rank, value, add=False)

    def need(self, task: Task, tensor: Tensor, chunk: int, start: int, stop: int) -> None:
        layout = self.plan.kv_layout if tensor.by_key else self.plan.q_layout
        wanted = Value(tensor, chunk, 0, len(layout.chunks[chunk]), start, stop, task.rank)
        found = self.assembled(task, task.rank, wanted, add=False)
        if not np.array_equal(found, self.identity(wanted)):
            raise UnsoundError(f"{tensor} of chunk {chunk} is not whole")

    def heads(self, block: int, tensor: Tensor) -> tuple[int, int]:
        b = self.blocks[block]
        heads = (b.head_start, b.head_stop)
        return self.plan.problem.kv_range(*heads) if tensor.by_key else heads

    def chunk(self, block: int, tensor: Tensor) -> int:
        b = self.blocks[block]
        return b.kv_chunk if tensor.by_key else b.q_chunk

    def compute(self, task: Compute) -> None:
        for number in task.reads:
            self.read(number, task.rank)
        for block in task.tile:
            for tensor in self.pass_.needs:
                self.need(task, tensor, self.chunk(block, tensor), *self.heads(block, tensor))
        for number in task.writes:
            value = self.values[number]
            rows = len(self.layout_of(value).chunks[value.chunk])
            mine = [b for b in task.tile if self.chunk(b, value.tensor) == value.chunk]
            if value.tensor not in self.pass_.results or value.rank != task.rank or not mine:
                raise UnsoundError("a launch writes what it does not compute")
            content = np.zeros((*self.shape(value), len(self.blocks)), dtype=np.int64)
            if value.rows != rows:
                raise UnsoundError("a launch writes part of a chunk")
            for block in mine:
                a, b = self.heads(block, value.tensor)
                a, b = max(a, value.head_start), min(b, value.head_stop)
                if a < b:
                    content[:, a - value.head_start : b - value.head_start, block] += 1
            self.write(number, content)

    def copy(self, task: Transfer | Collective) -> None:
        made = {}
        for number in task.writes:
            value = self.values[number]
            if isinstance(task, Collective) and task.op is CollectiveOp.REDUCE_SCATTER:
                ranks = {self.values[read].rank for read in task.reads}
                made[number] = sum(self.assembled(task, r, value, add=True) for r in ranks)
                continue
            sources = [read for read in task.reads if self.values[read].holds(value)]
            if not sources or (task.kind is TaskKind.TRANSFER and value.rank == task.rank):
                raise UnsoundError("nothing to copy, or nowhere to")
            source = self.values[sources[0]]
            rank = task.rank if isinstance(task, Transfer) else source.rank
            made[number] = self.read(sources[0], rank)[
                value.row_start - source.row_start : value.row_stop - source.row_start,
                value.head_start - source.head_start : value.head_stop - source.head_start,
            ].copy()
        for number, content in made.items():
            self.write(number, content)

    def expect(self, tensor: Tensor, chunk: int, owner: int) -> None:
        """Every block of a row or column stands in its result exactly once, and no other."""
        layout = self.plan.kv_layout if tensor.by_key else self.plan.q_layout
        rows, heads = len(layout.chunks[chunk]), self.plan.problem.heads_of(tensor)
        right = np.zeros((rows, heads, len(self.blocks)), dtype=np.int64)
        for block in range(len(self.blocks)):
            if self.chunk(block, tensor) == chunk:
                a, b = self.heads(block, tensor)
                right[:, a:b, block] = 1
        found = self.results.get((tensor, chunk))
        if right.size and (found is None or not np.array_equal(found, right)):
            raise UnsoundError(f"{tensor} of chunk {chunk} on rank {owner}")
