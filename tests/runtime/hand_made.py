"""A short way to write programs by hand: tasks run in the order in which they are added."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Sequence

from ultraattn.plans import (
    CollectiveOp,
    LocalOp,
    Pass,
    Plan,
    Program,
    ProgramBuilder,
    Tensor,
    Value,
)

Parts = dict[tuple[Tensor, int], int]
"""Partial results on one rank: (tensor, chunk) to value."""


class Hand:
    """One pass, over the blocks of a plan that is already made."""

    def __init__(self, plan: Plan, pass_: Pass) -> None:
        self.plan, self.pass_ = plan, pass_
        self.builder = ProgramBuilder(plan.problem, plan.place.node_of)
        self.blocks: dict[tuple[int, int], list[int]] = defaultdict(list)
        """Blocks of each (query chunk, key chunk), one a head range."""
        for block in plan.pass_plan(pass_).program.block_views:
            self.blocks[block.q_chunk, block.kv_chunk].append(self.builder.block(block))
        self.row = (
            (Tensor.Q,)
            if pass_ is Pass.FORWARD
            else (Tensor.Q, Tensor.DO, Tensor.LSE, Tensor.DELTA)
        )
        self.col = (Tensor.K, Tensor.V)
        self._own: dict[tuple[Tensor, int], int] = {}
        self._outputs: set[int] = set()
        self._tasks = 0

    def key(self) -> tuple[int]:
        self._tasks += 1
        return (self._tasks,)

    def value(self, number: int) -> Value:
        return self.builder.values[number]

    # Inputs

    def own(self, tensor: Tensor, chunk: int) -> int:
        """The owner's whole input."""
        if (tensor, chunk) not in self._own:
            layout = self.plan.kv_layout if tensor.by_key else self.plan.q_layout
            heads = self.plan.problem.heads_of(tensor)
            rank = layout.owners[chunk]
            made = self.builder.value(
                Value(tensor, chunk, 0, len(layout.chunks[chunk]), 0, heads, rank)
            )
            self._own[tensor, chunk] = made
            if tensor is Tensor.DELTA:
                reads = [self.own(Tensor.DO, chunk), self.own(Tensor.O, chunk)]
                self.builder.local(LocalOp.DELTA, rank, reads, [made], self.key())
        return self._own[tensor, chunk]

    def rows(self, chunk: int) -> list[int]:
        return [self.own(tensor, chunk) for tensor in self.row]

    def cols(self, chunk: int) -> list[int]:
        return [self.own(tensor, chunk) for tensor in self.col]

    # Tasks

    def send(
        self, values: Sequence[int], *targets: int, after: Iterable[int] = (), **part: int
    ) -> list[list[int]]:
        """One transfer of values, whole or in part; what arrives, for each target."""
        arrived = [[self.builder.copy(v, target, **part) for v in values] for target in targets]
        source = self.value(values[0]).rank
        writes = [v for some in arrived for v in some]
        self.last = self.builder.transfer(source, values, writes, self.key(), after=after)
        return arrived

    def launch(self, rank: int, blocks: Iterable[int], reads: Iterable[int]) -> Parts:
        """A launch; its partial results."""
        tile, made = sorted(blocks), {}
        for tensor in self.pass_.results:
            covers: dict[int, list[int]] = defaultdict(list)
            for block in tile:
                view = self.builder.blocks[block]
                covers[view.kv_chunk if tensor.by_key else view.q_chunk].append(block)
            for chunk, cover in covers.items():
                made[tensor, chunk] = self.result(tensor, chunk, rank, cover)
        self.last = self.builder.compute(rank, tile, reads, made.values(), self.key())
        return made

    def result(self, tensor: Tensor, chunk: int, rank: int, cover: Iterable[int]) -> int:
        """A partial result over the heads of its blocks."""
        cover, problem = tuple(sorted(cover)), self.plan.problem
        layout = self.plan.kv_layout if tensor.by_key else self.plan.q_layout
        heads = (0, problem.heads)
        if cover:
            views = [self.builder.blocks[block] for block in cover]
            heads = min(b.head_start for b in views), max(b.head_stop for b in views)
        if tensor.by_key:
            heads = problem.kv_range(*heads)
        rows = len(layout.chunks[chunk])
        return self.builder.value(Value(tensor, chunk, 0, rows, *heads, rank, cover=cover))

    def output(self, tensor: Tensor, chunk: int, cover: Iterable[int]) -> int:
        """A result in its owner's tensor."""
        layout = self.plan.kv_layout if tensor.by_key else self.plan.q_layout
        made = self.result(tensor, chunk, layout.owners[chunk], cover)
        self._outputs.add(made)
        return made

    def cover(self, parts: Iterable[int]) -> list[int]:
        return [block for part in parts for block in self.value(part).cover]

    def merge(self, parts: Sequence[Parts], rank: int) -> Parts:
        """Partial results of the same chunks into one, still partial."""
        keys = list(dict.fromkeys(key for part in parts for key in part))
        made = {}
        for key in keys:
            made[key] = self.result(*key, rank, self.cover(p[key] for p in parts if key in p))
        reads = [number for part in parts for number in part.values()]
        self.builder.merge(rank, reads, made.values(), self.key())
        return made

    def move(self, parts: Parts, target: int) -> Parts:
        """Partial results to another rank."""
        (arrived,) = self.send(list(parts.values()), target)
        return dict(zip(parts, arrived, strict=True))

    def finish_rows(self, parts: Iterable[Parts]) -> None:
        """Merges at every owner what has come there; fills what nothing sees."""
        by_key: dict[tuple[Tensor, int], list[int]] = defaultdict(list)
        for part in parts:
            for key, number in part.items():
                by_key[key].append(number)
        pairs = (
            [(Tensor.O, Tensor.LSE)]
            if self.pass_ is Pass.FORWARD
            else [(tensor,) for tensor in self.pass_.results]
        )
        for group in pairs:
            layout = self.plan.kv_layout if group[0].by_key else self.plan.q_layout
            for chunk, rank in enumerate(layout.owners):
                reads = [number for tensor in group for number in by_key[tensor, chunk]]
                writes = [
                    self.output(tensor, chunk, self.cover(by_key[tensor, chunk]))
                    for tensor in group
                ]
                if reads:
                    self.builder.merge(rank, reads, writes, self.key())
                else:
                    self.builder.local(LocalOp.FILL, rank, [], writes, self.key())

    def collective(self, op: CollectiveOp, reads: Iterable[int], writes: Iterable[int]) -> None:
        self.builder.collective(op, reads, writes, self.key())

    def local(self, op: LocalOp, rank: int, reads: Sequence[int], write: int) -> int:
        self.builder.local(op, rank, reads, [write], self.key())
        return write

    def program(self) -> Program:
        return self.builder.finish(frozenset(self._outputs))


def with_program(plan: Plan, pass_: Pass, program: Program) -> Plan:
    """The plan with another program for one pass."""
    part = dataclasses.replace(plan.pass_plan(pass_), strategy="hand-made", program=program)
    return dataclasses.replace(plan, **{str(pass_): part})
