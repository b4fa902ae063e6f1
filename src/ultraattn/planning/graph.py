"""Turns blocks and their ranks into a program: inputs first, tiles by arrival, partials back.

A note on tiles. A rank's blocks become launches by when their inputs are there:

    rank 1 of 4, its own row, arrivals from ranks 2, 3, 0:

        launch 0   own key chunk           at once
        launch 1   first arrival           while the others are on their way
        launch 2   the next two arrivals   (then four, eight, ...: few launches, few merges)

Blocks of another rank's query chunk stay in one launch a chunk, so that their partial result is
rounded once before it travels. In the backward pass a launch holds whole key chunks for the same
reason: the partial dK and dV of a chunk come from one launch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ultraattn.plans.builder import Key, ProgramBuilder
from ultraattn.plans.head_ranges import HeadRange, gaps, joined, runs
from ultraattn.plans.layout import Layout
from ultraattn.plans.passes import Pass
from ultraattn.plans.problem import Problem
from ultraattn.plans.program import Block, LocalOp, Program, Value
from ultraattn.plans.tensors import Tensor

Group = tuple[HeadRange, tuple[int, ...]]
"""A head range of one chunk, and the blocks of a launch in it."""
Lines = list[tuple[int, list[Group]]]
"""Chunks of a launch."""
Piece = tuple[int, int, tuple[int, ...]]
"""First and last head of what is there, and a value of each tensor that moves with it."""

Held = Mapping[tuple[int, Tensor, int], Sequence[HeadRange]]
"""Heads of inputs that a rank holds before a pass begins, all rows, by (rank, tensor, chunk)."""
NOTHING_HELD: Held = {}

START, INPUTS, WORK, END = range(4)
"""Phases of the order of issue."""


def build_program(
    pass_: Pass,
    problem: Problem,
    q_layout: Layout,
    kv_layout: Layout,
    nodes: Sequence[int],
    blocks: Sequence[Block],
    ranks: Sequence[int],
    held: Held = NOTHING_HELD,
) -> Program:
    """The program of one pass in which ``ranks[b]`` computes ``blocks[b]``, by direct transfers.

    What ranks hold before the pass begins (`held`) is not sent to them.
    """
    builder = ProgramBuilder(problem, nodes)
    graph = Graph(pass_, problem, q_layout, kv_layout, builder, ranks, held)
    graph.add_blocks(blocks)
    graph.send_inputs()
    graph.compute()
    graph.merge_results()
    return graph.builder.finish(frozenset(graph.outputs))


@dataclass
class Graph:
    """One pass while it is put together; variants of a stage override its method."""

    pass_: Pass
    problem: Problem
    q_layout: Layout
    kv_layout: Layout
    builder: ProgramBuilder
    ranks: Sequence[int]
    held: Held = field(default_factory=dict)
    outputs: set[int] = field(default_factory=set)
    # The owner's whole value of an input tensor, by (tensor, chunk).
    owned: dict[tuple[Tensor, int], int] = field(default_factory=dict)
    # What a rank has of a chunk, by (rank, by_key, chunk): heads, and a value of each tensor.
    at: dict[tuple[int, bool, int], list[Piece]] = field(default_factory=lambda: defaultdict(list))
    # Arrival step of a chunk at a rank, by (rank, by_key, chunk); absent where it is owned.
    arrival: dict[tuple[int, bool, int], int] = field(default_factory=dict)
    # Partial results at a rank, by rank and (tensor, chunk, heads).
    partials: dict[int, dict[tuple[Tensor, int, HeadRange], list[int]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    # What each rank's own launches wrote.
    launched: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))

    # Of each block, by whether keys are asked for: its chunk and its head range.
    chunks: tuple[list[int], list[int]] = ([], [])
    heads: tuple[list[HeadRange], list[HeadRange]] = ([], [])

    def layout(self, by_key: bool) -> Layout:
        """The layout of keys, or of queries."""
        return self.kv_layout if by_key else self.q_layout

    def add_blocks(self, blocks: Sequence[Block]) -> None:
        """Takes the blocks of the pass, before anything else."""
        self.builder.blocks.extend(blocks)
        spans = [(block.head_start, block.head_stop) for block in blocks]
        kv_span = {span: self.problem.kv_range(*span) for span in set(spans)}
        self.heads = (spans, [kv_span[span] for span in spans])
        self.chunks = ([b.q_chunk for b in blocks], [b.kv_chunk for b in blocks])

    # Inputs

    def moving(self, by_key: bool) -> tuple[Tensor, ...]:
        """What a rank needs of a chunk that it does not own."""
        if by_key:
            return (Tensor.K, Tensor.V)
        if self.pass_ is Pass.FORWARD:
            return (Tensor.Q,)
        return (Tensor.Q, Tensor.DO, Tensor.LSE, Tensor.DELTA)

    def own(self, tensor: Tensor, chunk: int) -> int:
        """The owner's whole value of an input tensor."""
        layout = self.layout(tensor.by_key)
        rank = layout.owners[chunk]
        known = self.owned.get((tensor, chunk))
        if known is None:
            heads = self.problem.heads_of(tensor)
            rows = len(layout.chunks[chunk])
            known = self.builder.value(Value(tensor, chunk, 0, rows, 0, heads, rank))
            self.owned[tensor, chunk] = known
            if tensor is Tensor.DELTA:
                reads = [self.own(Tensor.DO, chunk), self.own(Tensor.O, chunk)]
                self.builder.local(LocalOp.DELTA, rank, reads, [known], (START, rank, chunk))
        return known

    def send_inputs(self) -> None:
        """One message for each (chunk, rank that needs it): all its tensors, the heads needed."""
        needs: dict[tuple[int, bool, int], list[HeadRange]] = defaultdict(list)
        for block, rank in zip(self.builder.blocks, self.ranks, strict=True):
            heads = (block.head_start, block.head_stop)
            needs[rank, False, block.q_chunk].append(heads)
            needs[rank, True, block.kv_chunk].append(self.problem.kv_range(*heads))
        queue: dict[int, list[tuple[int, int, bool]]] = defaultdict(list)
        for rank, by_key, chunk in needs:
            owner = self.layout(by_key).owners[chunk]
            if owner == rank:
                whole = tuple(self.own(tensor, chunk) for tensor in self.moving(by_key))
                every = self.problem.kv_heads if by_key else self.problem.heads
                self.at[rank, by_key, chunk].append((0, every, whole))
            elif self._holds_all(rank, by_key, chunk, spans := runs(needs[rank, by_key, chunk])):
                self._take_chunk(rank, by_key, chunk, spans, ())
            else:
                step = (owner - rank) % self.q_layout.ranks
                queue[rank].append((step, chunk, by_key))
        for rank in sorted(queue):
            for position, (step, chunk, by_key) in enumerate(sorted(queue[rank])):
                self.arrival[rank, by_key, chunk] = position
                spans = runs(needs[rank, by_key, chunk])
                self._take_chunk(rank, by_key, chunk, spans, (INPUTS, step, chunk, int(by_key)))

    def _holds_all(self, rank: int, by_key: bool, chunk: int, spans: list[HeadRange]) -> bool:
        """Whether nothing of a chunk needs to be sent to a rank."""
        return bool(self.held) and all(
            self._holds(rank, tensor, chunk, span)
            for tensor in self.moving(by_key)
            for span in spans
        )

    def _holds(self, rank: int, tensor: Tensor, chunk: int, span: HeadRange) -> bool:
        held = self.held.get((rank, tensor, chunk), ())
        return any(start <= span[0] and span[1] <= stop for start, stop in held)

    def _take_chunk(
        self, rank: int, by_key: bool, chunk: int, heads: list[HeadRange], key: Key
    ) -> None:
        """Gives a rank the heads of a chunk: what it holds where it stands, the rest by message."""
        reads, writes = [], []
        there: list[list[int]] = [[] for _ in heads]
        rows = len(self.layout(by_key).chunks[chunk])
        for tensor in self.moving(by_key):
            sent = [span for span in heads if not self._holds(rank, tensor, chunk, span)]
            if sent:
                reads.append(self.own(tensor, chunk))
            for span, values in zip(heads, there, strict=True):
                value = self.builder.value(Value(tensor, chunk, 0, rows, *span, rank))
                values.append(value)
                if span in sent:
                    writes.append(value)
        for (start, stop), values in zip(heads, there, strict=True):
            self.at[rank, by_key, chunk].append((start, stop, tuple(values)))
        if writes:
            self.builder.transfer(self.layout(by_key).owners[chunk], reads, writes, key)

    # Tiles

    def compute(self) -> None:
        """Every rank's blocks as launches, ordered by when their inputs are there."""
        mine: dict[int, list[int]] = defaultdict(list)
        for block, rank in enumerate(self.ranks):
            mine[rank].append(block)
        for rank in sorted(mine):
            tiles = self._tiles(rank, mine[rank])
            lines = [self._lines(tile) for _, tile in tiles]
            several = self._in_several_tiles(rank, lines)
            for number, (ready, tile) in enumerate(tiles):
                self._launch(rank, tile, lines[number], (WORK, ready, rank, number), several)
            self._send_partials(rank, tiles)

    def _ready(self, rank: int, block: int) -> int:
        """The arrival after which a block can run; -1 where its inputs are owned."""
        return max(
            self.arrival.get((rank, False, self.chunks[False][block]), -1),
            self.arrival.get((rank, True, self.chunks[True][block]), -1),
        )

    def _tiles(self, rank: int, blocks: list[int]) -> list[tuple[int, list[int]]]:
        """(arrival waited for, blocks) of each launch, in the order in which they run."""
        lines: dict[int, list[int]] = defaultdict(list)
        free: list[int] = []
        by_key = self.pass_ is Pass.BACKWARD
        owners = self.layout(by_key).owners
        for block in blocks:
            chunk = self.chunks[by_key][block]
            if owners[chunk] == rank:
                free.append(block)
            else:
                lines[chunk].append(block)
        tiles = [(max(self._ready(rank, b) for b in line), 0, line) for line in lines.values()]
        by_arrival: dict[int, list[int]] = defaultdict(list)
        for block in free:
            by_arrival[self._ready(rank, block)].append(block)
        for ready, group in _doubling(by_arrival):
            tiles.append((ready, 1, group))
        return [(ready, tile) for ready, _, tile in sorted(tiles)]

    def _lines(self, tile: list[int]) -> tuple[Lines, Lines]:
        """The query chunks and the key chunks of a launch, each with its head ranges and blocks."""
        found: list[Lines] = []
        for by_key in (False, True):
            chunks = self.chunks[by_key]
            lines: dict[int, list[int]] = defaultdict(list)
            for block in tile:
                lines[chunks[block]].append(block)
            heads = self.heads[by_key]
            found.append([(c, self._by_heads(heads, blocks)) for c, blocks in lines.items()])
        return found[0], found[1]

    def _in_several_tiles(
        self, rank: int, tiles: list[tuple[Lines, Lines]]
    ) -> set[tuple[bool, int, HeadRange]]:
        """Results that are another rank's and come from several launches: kept wide until sent."""
        seen: set[tuple[bool, int, HeadRange]] = set()
        several: set[tuple[bool, int, HeadRange]] = set()
        for by_key in sorted({tensor.by_key for tensor in self.pass_.results}):
            owners = self.layout(by_key).owners
            for lines in tiles:
                for chunk, groups in lines[by_key]:
                    if owners[chunk] != rank:
                        for heads, _ in groups:
                            key = (by_key, chunk, heads)
                            (several if key in seen else seen).add(key)
        return several

    def _launch(
        self,
        rank: int,
        tile: list[int],
        lines: tuple[Lines, Lines],
        key: Key,
        several: set[tuple[bool, int, HeadRange]],
    ) -> None:
        reads: dict[int, None] = {}
        for by_key in (False, True):
            chunk_of, span_of = self.chunks[by_key], self.heads[by_key]
            needed = dict.fromkeys([(chunk_of[block], span_of[block]) for block in tile])
            pieces = [
                values
                for chunk, (start, stop) in needed
                for first, last, values in self.at[rank, by_key, chunk]
                if first < stop and start < last
            ]
            for of_tensor in zip(*pieces, strict=True):
                reads.update(dict.fromkeys(of_tensor))
        writes = []
        partials = self.partials[rank]
        for tensor in self.pass_.results:
            by_key = tensor.by_key
            chunks = self.layout(by_key).chunks
            for chunk, groups in lines[by_key]:
                rows = len(chunks[chunk])
                for heads, cover in groups:
                    wide = (by_key, chunk, heads) in several
                    value = self.builder.value(
                        Value(tensor, chunk, 0, rows, heads[0], heads[1], rank, wide, -1, cover)
                    )
                    partials[tensor, chunk, heads].append(value)
                    writes.append(value)
        self.launched[rank].update(writes)
        self.builder.compute(rank, tile, reads, writes, key)

    @staticmethod
    def _by_heads(heads: Sequence[HeadRange], blocks: Sequence[int]) -> list[Group]:
        """Blocks of one chunk by head range; ranges of key/value heads that meet are joined."""
        spans = [heads[block] for block in blocks]
        different = set(spans)
        if len(different) == 1:
            return [(spans[0], tuple(sorted(blocks)))]
        return [
            (span, tuple(sorted([b for b in blocks if span[0] <= heads[b][0] < span[1]])))
            for span in joined(different)
        ]

    # Results

    def _send_partials(self, rank: int, tiles: list[tuple[int, list[int]]]) -> None:
        """Each partial result of another rank's chunk, as soon as its last launch is done."""
        last: dict[tuple[bool, int], int] = {}
        for ready, tile in tiles:
            for block in tile:
                for by_key in (False, True):
                    last[by_key, self.chunks[by_key][block]] = ready
        messages: dict[tuple[int, bool, int], list[int]] = defaultdict(list)
        mine = self.partials[rank]
        for tensor, chunk, heads in list(mine):
            owner = self.layout(tensor.by_key).owners[chunk]
            if rank == owner or tensor is Tensor.LSE:  # An LSE goes with its O.
                continue
            group = (tensor, Tensor.LSE) if tensor is Tensor.O else (tensor,)
            parts = [mine.pop((each, chunk, heads)) for each in group]
            key = (WORK, last[tensor.by_key, chunk], rank, len(self.ranks) + chunk)
            messages[owner, tensor.by_key, chunk] += self._join(rank, parts, heads, key)
        for (owner, by_key, chunk), sent in messages.items():
            arrived = [self.builder.copy(part, owner) for part in sent]
            for value in arrived:
                v = self.builder.values[value]
                self.partials[owner][v.tensor, chunk, (v.head_start, v.head_stop)].append(value)
            number = 2 * len(self.ranks) + 2 * chunk + by_key
            self.builder.transfer(rank, sent, arrived, (WORK, last[by_key, chunk], rank, number))

    def _join(self, rank: int, groups: list[list[int]], heads: HeadRange, key: Key) -> list[int]:
        """One partial result for each group of them, by one merge where there are several."""
        if len(groups[0]) == 1:
            return [parts[0] for parts in groups]
        merged = []
        for parts in groups:
            first = self.builder.values[parts[0]]
            cover = tuple(sorted(b for part in parts for b in self.builder.values[part].cover))
            rows = (first.row_start, first.row_stop)
            value = Value(first.tensor, first.chunk, *rows, *heads, rank, cover=cover)
            merged.append(self.builder.value(value))
        self.builder.merge(rank, [part for parts in groups for part in parts], merged, key)
        return merged

    def merge_results(self) -> None:
        """One merge for each result chunk and head range at its owner; zeros where nothing is.

        A chunk that one launch of its owner computes whole needs none: that launch writes it.
        """
        by_chunk: dict[tuple[Tensor, int], dict[HeadRange, list[int]]] = defaultdict(dict)
        for held in self.partials.values():
            for (tensor, chunk, heads), parts in held.items():
                by_chunk[tensor, chunk].setdefault(heads, []).extend(parts)
        groups = (
            ((Tensor.O, Tensor.LSE),)
            if self.pass_ is Pass.FORWARD
            else tuple((tensor,) for tensor in self.pass_.results)
        )
        for group in groups:
            layout = self.layout(group[0].by_key)
            for chunk, rank in enumerate(layout.owners):
                self._merge_chunk(rank, group, chunk, by_chunk)

    def _merge_chunk(
        self,
        rank: int,
        group: tuple[Tensor, ...],
        chunk: int,
        by_chunk: Mapping[tuple[Tensor, int], dict[HeadRange, list[int]]],
    ) -> None:
        layout = self.layout(group[0].by_key)
        rows, heads = len(layout.chunks[chunk]), self.problem.heads_of(group[0])
        if not rows:
            return
        spans = by_chunk.get((group[0], chunk), {})
        alone = spans.get((0, heads), [])
        if len(spans) == len(alone) == 1 and alone[0] in self.launched[rank]:
            # The launch has written the result itself.
            self.outputs.update(by_chunk[tensor, chunk][0, heads][0] for tensor in group)
            return
        key = (END, rank, chunk, group[0].code)
        whole = joined(spans)
        for span in whole:
            reads, writes = [], []
            for tensor in group:
                parts = [
                    part
                    for heads_of_part, found in by_chunk[tensor, chunk].items()
                    if span[0] <= heads_of_part[0] < span[1]
                    for part in found
                ]
                covers = {b for part in parts for b in self.builder.values[part].cover}
                reads += sorted(parts)
                writes.append(self._output(tensor, chunk, span, rank, tuple(sorted(covers))))
            self.builder.merge(rank, reads, writes, key)
        for span in gaps(whole, heads):
            writes = [self._output(tensor, chunk, span, rank, ()) for tensor in group]
            self.builder.local(LocalOp.FILL, rank, [], writes, key)

    def _output(
        self, tensor: Tensor, chunk: int, heads: HeadRange, rank: int, cover: tuple[int, ...]
    ) -> int:
        rows = len(self.layout(tensor.by_key).chunks[chunk])
        value = self.builder.value(Value(tensor, chunk, 0, rows, *heads, rank, cover=cover))
        self.outputs.add(value)
        return value


def _doubling(by_arrival: Mapping[int, list[int]]) -> list[tuple[int, list[int]]]:
    """Joins arrivals into launches: what is owned, then 1, 1, 2, 4, 8, ... arrivals."""
    order = sorted(by_arrival)
    out: list[tuple[int, list[int]]] = []
    if order and order[0] == -1:
        out.append((-1, by_arrival[-1]))
        order = order[1:]
    size, at = 1, 0
    while at < len(order):
        group = order[at : at + size]
        out.append((group[-1], sorted(b for ready in group for b in by_arrival[ready])))
        at += size
        size = max(1, at)
    return out
