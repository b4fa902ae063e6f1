"""Turns blocks into programs in which keys and values pass the ranks, step by step.

One engine serves the whole family. Ranks stand as ``(node, place, lane)``:

    lanes    ranks that exchange tokens for heads first (Ulysses): each then holds all tokens of
             its position for its own range of heads
    places   positions of the inner ring: keys and values hop from place to place
    nodes    positions of the outer ring: what a place held first goes on to the next node

    ring, zigzag, stripe   1 node  x N places x 1 lane, over three layouts
    double_ring            M nodes x g places x 1 lane
    heads                  1 node  x 1 place  x N lanes
    heads_ring             1 node  x R places x U lanes

A note on what moves. Ring of three, keys and values k0, k1, k2, gradients d0, d1, d2 (backward):

    step   rank 0            rank 1            rank 2
    0      uses k0, d0 ->1   uses k1, d1 ->2   uses k2, d2 ->0
    1      uses k2, d2 ->1   uses k0, d0 ->2   uses k1, d1 ->0
    2      uses k1, d1 ->1   uses k2, d2 ->2   uses k0, d0 ->0

Every k passes every rank, whether a block needs it or not, and d goes home in the last hop, kept
in the accumulation dtype on the way: this is what the originals send. Blocks that see nothing are
not computed. Partial outputs are merged once, at the end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from ultraattn.errors import InputError
from ultraattn.plans.check import Pass
from ultraattn.plans.head_ranges import HeadRange
from ultraattn.plans.layout import Layout
from ultraattn.plans.problem import Problem
from ultraattn.plans.program import Block, CollectiveOp, Program
from ultraattn.strategies.draft import END, START, WORK, Draft, Held


def ring(
    pass_: Pass,
    problem: Problem,
    q_layout: Layout,
    kv_layout: Layout,
    nodes: Sequence[int],
    blocks: Sequence[Block],
) -> Program:
    """Every key chunk passes every rank; queries stay."""
    draft = Draft(pass_, problem, q_layout, kv_layout, nodes, blocks)
    return _Rings(draft, 1, q_layout.ranks, 1).program()


def double_ring(
    pass_: Pass,
    problem: Problem,
    q_layout: Layout,
    kv_layout: Layout,
    nodes: Sequence[int],
    blocks: Sequence[Block],
) -> Program:
    """A ring inside each node, and one between nodes: each key chunk enters a node once."""
    count = len(set(nodes))
    draft = Draft(pass_, problem, q_layout, kv_layout, nodes, blocks)
    return _Rings(draft, count, q_layout.ranks // count, 1).program()


def heads(
    pass_: Pass,
    problem: Problem,
    q_layout: Layout,
    kv_layout: Layout,
    nodes: Sequence[int],
    blocks: Sequence[Block],
) -> Program:
    """All-to-all from tokens to heads and back; a rank computes all blocks of its head range.

    Key/value heads that several ranks need are copied to each (kv_heads < ranks).
    """
    draft = Draft(pass_, problem, q_layout, kv_layout, nodes, blocks)
    return _Rings(draft, 1, 1, q_layout.ranks).program()


def heads_ring(
    pass_: Pass,
    problem: Problem,
    q_layout: Layout,
    kv_layout: Layout,
    nodes: Sequence[int],
    blocks: Sequence[Block],
    shape: tuple[int, int],
) -> Program:
    """``shape`` is (U, R): all-to-all among U neighbouring ranks, then rings over R of them."""
    lanes, places = shape
    if lanes * places != q_layout.ranks:
        raise InputError(
            f"strategy heads_ring {lanes} x {places} over {q_layout.ranks} ranks: the product of "
            "both must be the number of ranks"
        )
    draft = Draft(pass_, problem, q_layout, kv_layout, nodes, blocks)
    return _Rings(draft, 1, places, lanes).program()


def lane_heads(heads: int, lanes: int) -> list[HeadRange]:
    """Query heads of each lane: edges ``floor(u * heads / lanes)``.

    >>> lane_heads(8, 3)
    [(0, 2), (2, 5), (5, 8)]
    """
    return [(u * heads // lanes, (u + 1) * heads // lanes) for u in range(lanes)]


@dataclass
class _Rings:
    """The engine. A position is (node, place) as one number; a rank is a position and a lane."""

    draft: Draft
    nodes: int
    places: int
    lanes: int
    spans: list[HeadRange] = field(init=False)
    # What each rank holds of the query side, and of the key side at each step.
    q_held: dict[int, Held] = field(default_factory=dict)
    kv_held: dict[tuple[int, int], Held] = field(default_factory=dict)
    # Partial results of query chunks at each rank, one a step.
    partials: dict[int, list[Held]] = field(default_factory=lambda: defaultdict(list))
    # Gradients of keys and values after a step, and what came home to each rank.
    carried: dict[tuple[int, int], Held] = field(default_factory=dict)
    home: dict[int, Held] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.spans = lane_heads(self.draft.problem.heads, self.lanes)

    @property
    def positions(self) -> int:
        """Positions of the outer and the inner ring together: as many as steps."""
        return self.nodes * self.places

    def program(self) -> Program:
        tiles = self._tiles()
        self._tokens_to_heads()
        for step in range(self.positions):
            for position in range(self.positions):
                for lane in range(self.lanes):
                    self._keys(position, lane, step)
        for step in range(self.positions):
            for position in range(self.positions):
                origin = self._origin(position, step)
                for lane in range(self.lanes):
                    rank = position * self.lanes + lane
                    self._work(rank, step, tiles.get((position, origin, lane), []))
        if self.draft.pass_ is Pass.BACKWARD and self.positions > 1:
            self._gradients_home()
        return self._heads_to_tokens()

    def _members(self, position: int) -> range:
        return range(position * self.lanes, (position + 1) * self.lanes)

    def _origin(self, position: int, step: int) -> int:
        """The position whose keys are here at a step."""
        node, place = divmod(position, self.places)
        outer, inner = divmod(step, self.places)
        return (node - outer) % self.nodes * self.places + (place - inner) % self.places

    def _source(self, position: int, step: int) -> tuple[int, int]:
        """(position, step) where the keys of a step were before they came here."""
        node, place = divmod(position, self.places)
        if step % self.places:
            return node * self.places + (place - 1) % self.places, step - 1
        return (node - 1) % self.nodes * self.places + place, step - self.places

    def _tiles(self) -> dict[tuple[int, int, int], list[int]]:
        """Blocks by (position of the queries, position of the keys, lane)."""
        q_owner = [rank // self.lanes for rank in self.draft.q_layout.owners]
        kv_owner = [rank // self.lanes for rank in self.draft.kv_layout.owners]
        tiles: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        lane_of = [lane for lane, (a, b) in enumerate(self.spans) for _ in range(a, b)]
        for number, block in enumerate(self.draft.blocks):
            lane = lane_of[block.head_start]
            if block.head_stop > self.spans[lane][1]:
                raise InputError(
                    f"blocks of heads {block.head_start}:{block.head_stop} over {self.lanes} head "
                    f"ranges: a rank computes heads {self.spans[lane][0]}:{self.spans[lane][1]}; "
                    f"cut the blocks into {self.lanes} head groups"
                )
            tiles[q_owner[block.q_chunk], kv_owner[block.kv_chunk], lane].append(number)
        return tiles

    def _tokens_to_heads(self) -> None:
        """What each rank holds at the start: its position's chunks, of its own heads."""
        draft = self.draft
        for position in range(self.positions):
            members = self._members(position)
            reads: dict[int, None] = {}
            writes = []
            for rank, span in zip(members, self.spans, strict=True):
                sides: list[Held] = []
                for by_key in (False, True):
                    held: Held = {}
                    for chunk in draft.chunks_of(members, by_key):
                        for tensor in draft.moving(by_key):
                            own = draft.own(tensor, chunk)
                            held[tensor, chunk] = own
                            if draft.builder.values[own].rank != rank:
                                copy = draft.builder.part(own, rank, draft.heads(tensor, span))
                                held[tensor, chunk] = copy
                                reads[own] = None
                                writes.append(copy)
                    sides.append(held)
                self.q_held[rank], self.kv_held[rank, 0] = sides
            if writes:
                draft.builder.collective(
                    CollectiveOp.ALL_TO_ALL, reads, writes, (START, 1, position)
                )

    def _keys(self, position: int, lane: int, step: int) -> None:
        """The hop that brings the keys of a step; issued before the compute of the step before."""
        if step == 0:
            return
        source, at_step = self._source(position, step)
        sender, rank = source * self.lanes + lane, position * self.lanes + lane
        self.kv_held[rank, step] = self.draft.send(
            sender,
            rank,
            self.kv_held[sender, at_step],
            (WORK, 2 * at_step, 0, sender),
            self.spans[lane],
        )

    def _work(self, rank: int, step: int, tile: list[int]) -> None:
        draft = self.draft
        if not tile:
            return
        rings = draft.pass_ is Pass.BACKWARD and self.positions > 1
        wide = draft.results(by_key=True) if rings else ()
        held = {**self.q_held[rank], **self.kv_held[rank, step]}
        span = self.spans[rank % self.lanes]
        out = draft.launch(rank, tile, held, span, (WORK, 2 * step + 1, 0, rank), wide)
        self.partials[rank].append({w: n for w, n in out.items() if not w[0].by_key})
        by_key = {w: n for w, n in out.items() if w[0].by_key}
        if rings:
            self.carried[rank, step] = by_key
        elif by_key:
            self.home[rank] = by_key

    def _gradients_home(self) -> None:
        """Gradients travel with their keys, add up on the way, and return in the last hop."""
        draft = self.draft
        arriving: dict[int, Held] = {}
        between: dict[int, Held] = {}
        for step in range(self.positions):
            outer, inner = divmod(step, self.places)
            sums: dict[int, Held] = {}
            for rank in range(draft.ranks):
                position, lane = divmod(rank, self.lanes)
                mine = self.carried.get((rank, step), {})
                span, key = self.spans[lane], (WORK, 2 * step + 1, 1, rank)
                if inner == 0:
                    members = self._members(self._origin(position, step))
                    wanted = [
                        (tensor, chunk)
                        for chunk in draft.chunks_of(members, by_key=True)
                        for tensor in draft.results(by_key=True)
                        if (tensor, chunk) not in mine
                    ]
                    sums[rank] = {**mine, **draft.zeros(rank, wanted, span, key, wide=True)}
                else:
                    sums[rank] = draft.merged(rank, [arriving[rank], mine], key, wide=True)
            arriving = {}
            for rank, held in sums.items():
                if self.places == 1:
                    arriving[rank] = held
                    continue
                position, lane = divmod(rank, self.lanes)
                node, place = divmod(position, self.places)
                after = node * self.places + (place + 1) % self.places
                target = after * self.lanes + lane
                arriving[target] = draft.send(rank, target, held, (WORK, 2 * step + 1, 2, rank))
            if inner == self.places - 1:
                between = self._next_node(step, outer, arriving, between)
        self.home = between

    def _next_node(
        self, step: int, outer: int, window: dict[int, Held], carry: dict[int, Held]
    ) -> dict[int, Held]:
        """Adds what a node made to what came from the node before, and sends it on."""
        out: dict[int, Held] = {}
        for rank in sorted(window):
            held = window[rank]
            if outer:
                key = (WORK, 2 * step + 1, 3, rank)
                held = self.draft.merged(rank, [carry[rank], held], key, wide=True)
            if self.nodes == 1:
                out[rank] = held
                continue
            target = (rank + self.places * self.lanes) % self.draft.ranks
            out[target] = self.draft.send(rank, target, held, (WORK, 2 * step + 1, 4, rank))
        return out

    def _heads_to_tokens(self) -> Program:
        """Partial results to the owners of their chunks: one all-to-all a position."""
        draft = self.draft
        owners = draft.q_layout.owners, draft.kv_layout.owners
        for position in range(self.positions):
            reads, writes = [], []
            for rank in self._members(position):
                foreign: list[Held] = []
                for held in (*self.partials[rank], self.home.get(rank, {})):
                    mine: Held = {}
                    others: Held = {}
                    for where, number in held.items():
                        owned = owners[where[0].by_key][where[1]] == rank
                        (mine if owned else others)[where] = number
                    draft.arrived(mine)
                    foreign.append(others)
                for number in self._narrow(rank, foreign):
                    value = draft.builder.values[number]
                    owner = owners[value.tensor.by_key][value.chunk]
                    copy = draft.builder.copy(number, owner)
                    draft.arrived({(value.tensor, value.chunk): copy})
                    reads.append(number)
                    writes.append(copy)
            if writes:
                draft.builder.collective(CollectiveOp.ALL_TO_ALL, reads, writes, (END, 1, position))
        return draft.finish()

    def _narrow(self, rank: int, parts: list[Held]) -> list[int]:
        """One partial result of each chunk, in the dtype in which it travels."""
        groups: dict[tuple[bool, int], list[Held]] = defaultdict(list)
        for part in parts:
            split: dict[tuple[bool, int], Held] = defaultdict(dict)
            for (tensor, chunk), number in part.items():
                split[tensor.by_key, chunk][tensor, chunk] = number
            for where, held in split.items():
                groups[where].append(held)
        out: list[int] = []
        for (by_key, chunk), found in groups.items():
            key = (END, 0, rank, chunk, int(by_key))
            out += self.draft.merged(rank, found, key, wide=False).values()
        return out


def rings_of(ranks: int) -> list[tuple[int, int]]:
    """Every (U, R) with U R = ranks, by ascending U.

    >>> rings_of(6)
    [(1, 6), (2, 3), (3, 2), (6, 1)]
    """
    return [(u, ranks // u) for u in range(1, ranks + 1) if ranks % u == 0]
