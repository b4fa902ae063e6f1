"""Collects the parts that every rival shares: owned inputs, launches, and results at their owners.

A rival fixes which rank computes a block and how inputs get there; `Draft` adds the rest, so that
a strategy's own module holds nothing but what sets it apart.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ultraattn.plans.builder import Key, ProgramBuilder
from ultraattn.plans.check import Pass
from ultraattn.plans.head_ranges import HeadRange, gaps, runs
from ultraattn.plans.layout import Layout
from ultraattn.plans.problem import Problem
from ultraattn.plans.program import Block, LocalOp, Program, Value
from ultraattn.plans.tensors import Tensor

Held = dict[tuple[Tensor, int], int]
"""The value of a (tensor, chunk) that a rank holds."""

START, WORK, END = range(3)
"""Phases of the order of issue."""


@dataclass
class Draft:
    """One pass of a rival while it is put together.

    `parts` collects the partial results that have reached their owner; `finish` merges them.
    """

    pass_: Pass
    problem: Problem
    q_layout: Layout
    kv_layout: Layout
    nodes: Sequence[int]
    blocks: Sequence[Block]
    builder: ProgramBuilder = field(init=False)
    _rows: list[list[int]] = field(init=False)
    _moving: tuple[tuple[Tensor, ...], ...] = field(init=False)
    _results: tuple[tuple[Tensor, ...], ...] = field(init=False)
    parts: dict[tuple[Tensor, int], list[int]] = field(default_factory=lambda: defaultdict(list))
    _owned: Held = field(default_factory=dict)
    _last: tuple[tuple[tuple[int, ...], ...], tuple[int, ...]] = ((), ())
    _from_launch: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        # Worked out once: programs of many ranks ask tens of thousands of times.
        self._rows = [layout.chunks.sizes().tolist() for layout in (self.q_layout, self.kv_layout)]
        forward = self.pass_ is Pass.FORWARD
        queries = (Tensor.Q,) if forward else (Tensor.Q, Tensor.DO, Tensor.LSE, Tensor.DELTA)
        self._moving = (queries, (Tensor.K, Tensor.V))
        self._results = tuple(
            tuple(t for t in self.pass_.results if t.by_key == by_key) for by_key in (False, True)
        )
        self.builder = ProgramBuilder(self.problem, self.nodes)
        self.builder.blocks.extend(self.blocks)

    @property
    def ranks(self) -> int:
        """Ranks that take part."""
        return self.q_layout.ranks

    def layout(self, by_key: bool) -> Layout:
        """The layout of keys, or of queries."""
        return self.kv_layout if by_key else self.q_layout

    def rows(self, tensor: Tensor, chunk: int) -> int:
        """Rows of a chunk."""
        return self._rows[tensor.by_key][chunk]

    def moving(self, by_key: bool) -> tuple[Tensor, ...]:
        """The tensors that a launch reads of key chunks, or of query chunks."""
        return self._moving[by_key]

    def results(self, by_key: bool) -> tuple[Tensor, ...]:
        """The results of the pass that are keyed by key chunks, or by query chunks."""
        return self._results[by_key]

    def chunks_of(self, ranks: Iterable[int], by_key: bool) -> list[int]:
        """The chunks with rows that some ranks own, in order of rank."""
        layout = self.layout(by_key)
        rows = self._rows[by_key]
        return [c for rank in ranks for c in layout.owned[rank] if rows[c]]

    def own(self, tensor: Tensor, chunk: int) -> int:
        """The owner's whole value of an input; delta is computed there from its dO and O."""
        known = self._owned.get((tensor, chunk))
        if known is not None:
            return known
        owner = self.layout(tensor.by_key).owners[chunk]
        heads = self.problem.heads_of(tensor)
        value = self.builder.value(
            Value(tensor, chunk, 0, self.rows(tensor, chunk), 0, heads, owner)
        )
        self._owned[tensor, chunk] = value
        if tensor is Tensor.DELTA:
            reads = [self.own(Tensor.DO, chunk), self.own(Tensor.O, chunk)]
            self.builder.local(LocalOp.DELTA, owner, reads, [value], (START, 0, owner, chunk))
        return value

    def heads(self, tensor: Tensor, heads: HeadRange) -> HeadRange:
        """Query heads as heads of a tensor."""
        return self.problem.kv_range(*heads) if tensor.by_key else heads

    def launch(
        self,
        rank: int,
        tile: Sequence[int],
        held: Held,
        heads: HeadRange,
        key: Key,
        wide: Iterable[Tensor] = (),
    ) -> Held:
        """Computes a tile; returns the partial result of each (tensor, chunk), all of `heads`.

        Args:
            rank: where.
            tile: blocks, within the query heads `heads`.
            held: what the rank holds of every chunk that the tile needs.
            heads: the query heads that the rank computes.
            key: its place in the order of issue.
            wide: results to keep in the accumulation dtype.
        """
        lines: dict[tuple[bool, int], list[int]] = defaultdict(list)
        for number in tile:
            block = self.blocks[number]
            lines[False, block.q_chunk].append(number)
            lines[True, block.kv_chunk].append(number)
        ordered = sorted(lines)
        reads = [held[t, chunk] for by_key, chunk in ordered for t in self._moving[by_key]]
        spans = heads, self.problem.kv_range(*heads)
        out: Held = {}
        for by_key, chunk in ordered:
            rows, (start, stop) = self._rows[by_key][chunk], spans[by_key]
            cover = tuple(sorted(lines[by_key, chunk]))
            for tensor in self._results[by_key]:
                out[tensor, chunk] = self.builder.value(
                    Value(tensor, chunk, 0, rows, start, stop, rank, tensor in wide, -1, cover)
                )
        self.builder.compute(rank, tile, reads, out.values(), key)
        self._from_launch.update(out.values())
        return out

    def zeros(
        self,
        rank: int,
        wanted: Iterable[tuple[Tensor, int]],
        heads: HeadRange,
        key: Key,
        wide: bool,
    ) -> Held:
        """Partial results of no block: what a strategy that sends everything sends."""
        out: Held = {}
        spans = heads, self.problem.kv_range(*heads)
        for tensor, chunk in wanted:
            rows = self.rows(tensor, chunk)
            out[tensor, chunk] = self.builder.value(
                Value(tensor, chunk, 0, rows, *spans[tensor.by_key], rank, wide)
            )
        if out:
            self.builder.local(LocalOp.FILL, rank, [], out.values(), key)
        return out

    def merged(self, rank: int, parts: Sequence[Held], key: Key, wide: bool) -> Held:
        """Partial results of equal chunks and heads as one each; `wide` as in `Value`.

        Nothing is done to a part that stands alone and has the wanted dtype.
        """
        lists: dict[tuple[Tensor, int], list[int]] = defaultdict(list)
        for part in parts:
            for where, number in part.items():
                lists[where].append(number)
        out: Held = {}
        reads: list[int] = []
        writes: list[int] = []
        for where, numbers in lists.items():
            first = self.builder.values[numbers[0]]
            plain = where[0] is Tensor.LSE
            if len(numbers) == 1 and (first.wide == wide or plain):
                out[where] = numbers[0]
                continue
            out[where] = self.builder.value(
                Value(
                    first.tensor, first.chunk, first.row_start, first.row_stop, first.head_start,
                    first.head_stop, rank, wide and not plain, -1, self._joint(numbers),
                )
            )  # fmt: skip
            reads += numbers
            writes.append(out[where])
        if writes:
            self.builder.merge(rank, reads, writes, key)
        return out

    def _joint(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """The blocks that some values cover, ascending; K and V gradients share theirs."""
        covers = tuple(self.builder.values[n].cover for n in numbers)
        if self._last[0] != covers:
            self._last = covers, tuple(sorted(itertools.chain.from_iterable(covers)))
        return self._last[1]

    def send(
        self, source: int, target: int, held: Held, key: Key, heads: HeadRange | None = None
    ) -> Held:
        """One message with everything in `held` (only of `heads`, where given)."""
        out: Held = {}
        spans = None if heads is None else (heads, self.problem.kv_range(*heads))
        for where, number in held.items():
            if spans is None:
                out[where] = self.builder.copy(number, target)
            else:
                out[where] = self.builder.part(number, target, spans[where[0].by_key])
        if out:
            self.builder.transfer(source, held.values(), out.values(), key)
        return out

    def arrived(self, held: Held) -> None:
        """Partial results that now are with their owners."""
        for where, number in held.items():
            self.parts[where].append(number)

    def finish(self, outputs: Iterable[int] = ()) -> Program:
        """Merges `parts` into the results; rows and heads that no block covers are filled.

        A part that is the whole result already, and was computed by the owner, is the result.
        `outputs` are results that stand in the caller's tensors already.
        """
        done = set(outputs)
        complete = {(self.builder.values[n].tensor, self.builder.values[n].chunk) for n in done}
        groups: list[tuple[Tensor, ...]] = (
            [(Tensor.O, Tensor.LSE)]
            if self.pass_ is Pass.FORWARD
            else [(tensor,) for tensor in self.pass_.results]
        )
        for group in groups:
            layout = self.layout(group[0].by_key)
            for chunk, owner in enumerate(layout.owners):
                if len(layout.chunks[chunk]) and (group[0], chunk) not in complete:
                    done.update(self._result(group, chunk, owner))
        return self.builder.finish(frozenset(done))

    def _result(self, group: tuple[Tensor, ...], chunk: int, owner: int) -> list[int]:
        values, heads = self.builder.values, self.problem.heads_of(group[0])
        parts = {tensor: self.parts[tensor, chunk] for tensor in group}
        first = parts[group[0]]
        if (
            len(first) == 1
            and (values[first[0]].head_start, values[first[0]].head_stop) == (0, heads)
            and not values[first[0]].wide
            and first[0] in self._from_launch
        ):
            return [number for tensor in group for number in parts[tensor]]
        rows = self.rows(group[0], chunk)
        key = (END, 2, owner, chunk, group[0].code)
        covered = runs((values[n].head_start, values[n].head_stop) for n in first)
        out = []
        for start, stop in covered:
            reads, writes = [], []
            for tensor in group:
                inside = [n for n in parts[tensor] if start <= values[n].head_start < stop]
                cover = sorted({b for n in inside for b in values[n].cover})
                reads += inside
                writes.append(
                    self.builder.value(
                        Value(tensor, chunk, 0, rows, start, stop, owner, cover=tuple(cover))
                    )
                )
            self.builder.merge(owner, reads, writes, key)
            out += writes
        for start, stop in gaps(covered, heads):
            writes = [
                self.builder.value(Value(tensor, chunk, 0, rows, start, stop, owner))
                for tensor in group
            ]
            self.builder.local(LocalOp.FILL, owner, [], writes, key)
            out += writes
        return out
