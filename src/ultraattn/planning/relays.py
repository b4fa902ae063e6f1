"""Turns blocks and their ranks into a program in which a chunk crosses to a node once.

Where `graph` sends every chunk from its owner to each rank that needs it, here a rank of the other
node, a gateway (`routes`), receives it once and hands it on inside; partial results of a foreign
chunk are added up inside the node, kept wide, before they cross once. What one rank sends another
in the same wave is one message.

    wave 0       inside every node: own chunks to those that need them
    wave w       node n sends to node n + w over the NICs, then gateways share inside
    work         launches by wave; results of a wave go home beside the launches of the next

`How` says how much one message holds: waves apart let computing start early, all waves together,
as collectives, spare start-ups.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from ultraattn.planning.graph import INPUTS, WORK, Graph
from ultraattn.planning.mail import Mail
from ultraattn.planning.routes import MESSAGE, Demand, Nodes, Way, ways
from ultraattn.plans.builder import Key, ProgramBuilder
from ultraattn.plans.head_ranges import HeadRange, joined, runs
from ultraattn.plans.layout import Layout
from ultraattn.plans.passes import Pass
from ultraattn.plans.problem import Problem
from ultraattn.plans.program import Block, LocalOp, Program, Value
from ultraattn.plans.tensors import Tensor

BEFORE, INSIDE, CROSS, SHARE = range(4)
"""Hops of an input: to the rank that sends it out, inside its node, between nodes, inside."""


class How(NamedTuple):
    """How messages are put together."""

    parts: int = 1
    """Waves of each pair of nodes."""
    together: bool = False
    """All waves as one, by collectives: fewest start-ups, and nothing overlaps."""
    grouped: bool = False
    """Hops inside a node by one collective a wave."""
    message: int = MESSAGE
    """Bytes that a NIC moves in the start-up of a message; smaller stripes do not pay."""


def build_relayed(
    pass_: Pass,
    problem: Problem,
    q_layout: Layout,
    kv_layout: Layout,
    nodes: Sequence[int],
    blocks: Sequence[Block],
    ranks: Sequence[int],
    how: How = How(),  # noqa: B008  a tuple
) -> Program:
    """The program of one pass in which ``ranks[b]`` computes ``blocks[b]``, by way of gateways."""
    builder = ProgramBuilder(problem, nodes)
    graph = _Relayed(
        pass_, problem, q_layout, kv_layout, builder, ranks, nodes=Nodes.of(nodes), how=how
    )
    graph.add_blocks(blocks)
    graph.send_inputs()
    graph.compute()
    graph.merge_results()
    return graph.builder.finish(frozenset(graph.outputs))


class _Piece(NamedTuple):
    """A demand, what it is of, and the ways it takes."""

    by_key: bool
    chunk: int
    heads: HeadRange
    demand: Demand
    ways: list[Way]


@dataclass
class _Relayed(Graph):
    nodes: Nodes = field(kw_only=True)
    how: How = field(kw_only=True)
    # Values that came to a rank which reads them, by (rank, tensor, chunk).
    came: dict[tuple[int, Tensor, int], list[int]] = field(
        default_factory=lambda: defaultdict(list)
    )
    # Values at gateways that the rank itself does not read, by (rank, tensor, chunk).
    passing: dict[tuple[int, Tensor, int], list[int]] = field(
        default_factory=lambda: defaultdict(list)
    )
    # Head ranges of the blocks of each (rank, by_key, chunk), joined where they overlap.
    spans: dict[tuple[int, bool, int], list[HeadRange]] = field(default_factory=dict)
    # The wave after which the last launch for a (rank, by_key, chunk) runs.
    last: dict[tuple[int, bool, int], int] = field(default_factory=dict)

    def _needs(self) -> None:
        found: dict[tuple[int, bool, int], set[HeadRange]] = defaultdict(set)
        for by_key in (False, True):
            for key in set(zip(self.ranks, self.chunks[by_key], self.heads[by_key], strict=True)):
                found[key[0], by_key, key[1]].add(key[2])
        self.spans = {key: joined(found[key]) for key in sorted(found)}

    # Inputs

    def wave(self, source: int, target: int, by_key: bool, chunk: int) -> int:
        """The wave in which a chunk goes from a rank's node to another; from 1."""
        if self.how.together:
            return 1
        node, count = self.nodes.node, len(self.nodes.members)
        owned = self.layout(by_key).owned[self.layout(by_key).owners[chunk]]
        part = owned.index(chunk) * self.how.parts // len(owned)
        return 1 + ((node[target] - node[source]) % count - 1) * self.how.parts + part

    def send_inputs(self) -> None:
        """Every chunk over the links of its ways; each message holds a wave of a pair of ranks."""
        self._needs()
        node = self.nodes.node
        inside: list[tuple[int, bool, int]] = []
        away: dict[tuple[bool, int, int], dict[int, list[HeadRange]]] = defaultdict(dict)
        for (rank, by_key, chunk), spans in self.spans.items():
            owner = self.layout(by_key).owners[chunk]
            for tensor in self.moving(by_key):
                self.own(tensor, chunk)
            if rank != owner:
                near = node[rank] == node[owner]
                step = 0 if near else self.wave(owner, rank, by_key, chunk)
                self.arrival[rank, by_key, chunk] = step
                if near:
                    inside.append((rank, by_key, chunk))
                else:
                    away[by_key, chunk, node[rank]][rank] = runs(spans)
        pieces = self._pieces(away)
        mail = Mail(self.builder, self.nodes)
        for rank, by_key, chunk in inside:
            for start, stop in runs(self.spans[rank, by_key, chunk]):
                for tensor in self.moving(by_key):
                    source = self.own(tensor, chunk)
                    copy = self.builder.copy(source, rank, head_start=start, head_stop=stop)
                    self.came[rank, tensor, chunk].append(copy)
                    owner = self.builder.values[source].rank
                    mail.send((INPUTS, INSIDE), owner, rank, source, copy)
        mail.post(self.how.grouped or self.how.together, self.how.together)
        for piece in pieces:
            for way in piece.ways:
                self._carry(mail, piece, way)
        mail.post(self.how.grouped or self.how.together, self.how.together)

    def _pieces(
        self, away: dict[tuple[bool, int, int], dict[int, list[HeadRange]]]
    ) -> list[_Piece]:
        """What crosses between nodes, cut by heads where ranks need different ones."""
        pieces = []
        for (by_key, chunk, _), users in sorted(away.items()):
            layout = self.layout(by_key)
            owner, rows = layout.owners[chunk], len(layout.chunks[chunk])
            row_bytes = sum(self.problem.widths.row_bytes(t) for t in self.moving(by_key))
            home = self.nodes.members[self.nodes.node[owner]]
            for start, stop in _atoms(users.values()):
                holders = tuple(
                    rank
                    for rank in home
                    if rank == owner
                    or _within((start, stop), self.spans.get((rank, by_key, chunk), ()))
                )
                asking = tuple(r for r in sorted(users) if _within((start, stop), users[r]))
                demand = Demand(owner, holders, asking, rows, row_bytes * (stop - start))
                pieces.append(_Piece(by_key, chunk, (start, stop), demand, []))
        found = ways([piece.demand for piece in pieces], self.nodes, self.how.message)
        return [piece._replace(ways=each) for piece, each in zip(pieces, found, strict=True)]

    def _carry(self, mail: Mail, piece: _Piece, way: Way) -> None:
        """One way of a piece: to the rank that sends it out, across, and on to all that need it."""
        by_key, chunk, demand = piece.by_key, piece.chunk, piece.demand
        wave = self.wave(demand.owner, way.far, by_key, chunk)
        for tensor in self.moving(by_key):
            source = self._held(tensor, piece, way, demand)
            if source is None:
                whole = self.own(tensor, chunk)
                source = self._copy(whole, way.near, piece, way)
                self.passing[way.near, tensor, chunk].append(source)
                mail.send((INPUTS, BEFORE), demand.owner, way.near, whole, source)
            arrived = self._copy(source, way.far, piece, way)
            mail.send((INPUTS, CROSS + wave, 0), way.near, way.far, source, arrived)
            keep = self.came if way.far in demand.users else self.passing
            keep[way.far, tensor, chunk].append(arrived)
            for user in demand.users:
                if user != way.far:
                    copy = self._copy(arrived, user, piece, way)
                    self.came[user, tensor, chunk].append(copy)
                    mail.send((INPUTS, CROSS + wave, 1), way.far, user, arrived, copy)

    def _held(self, tensor: Tensor, piece: _Piece, way: Way, demand: Demand) -> int | None:
        """The value of the rank that sends out, where it has the rows and heads."""
        if way.near == demand.owner:
            return self.own(tensor, piece.chunk)
        wanted = Value(tensor, piece.chunk, way.row_start, way.row_stop, *piece.heads, way.near)
        for store in (self.came, self.passing):
            for number in store.get((way.near, tensor, piece.chunk), ()):
                if self.builder.values[number].holds(wanted):
                    return number
        return None

    def _copy(self, number: int, rank: int, piece: _Piece, way: Way) -> int:
        start, stop = piece.heads
        return self.builder.copy(
            number, rank, row_start=way.row_start, row_stop=way.row_stop,
            head_start=start, head_stop=stop,
        )  # fmt: skip

    # Tiles

    def compute(self) -> None:
        """Every rank's blocks as launches, one a wave; then their results go home."""
        mine: dict[int, list[int]] = defaultdict(list)
        for block, rank in enumerate(self.ranks):
            mine[rank].append(block)
        inner = self._added_inside()
        for rank in sorted(mine):
            tiles = self._tiles(rank, mine[rank])
            several: dict[tuple[bool, int], int] = defaultdict(int)
            for ready, tile in tiles:
                for by_key in (False, True):
                    for chunk in {self.chunks[by_key][block] for block in tile}:
                        several[by_key, chunk] += 1
                        self.last[rank, by_key, chunk] = ready
            wide = {
                (by_key, chunk)
                for (by_key, chunk), count in several.items()
                if self.layout(by_key).owners[chunk] != rank
                and (count > 1 or (by_key, chunk, self.nodes.node[rank]) in inner)
            }
            for number, (ready, tile) in enumerate(tiles):
                self._launch_wave(rank, tile, (WORK, ready, rank, number), wide)
        self._results_home(inner)

    def _tiles(self, rank: int, blocks: list[int]) -> list[tuple[int, list[int]]]:
        """One launch a wave; own chunks wait for those of the node where collectives bring them."""
        first = 0 if self.how.grouped or self.how.together else -1
        by_wave: dict[int, list[int]] = defaultdict(list)
        for block in blocks:
            by_wave[max(first, self._ready(rank, block))].append(block)
        return sorted(by_wave.items())

    def _added_inside(self) -> set[tuple[bool, int, int]]:
        """(by_key, chunk, node) of foreign chunks with partial results on several ranks."""
        ranks: dict[tuple[bool, int, int], int] = defaultdict(int)
        for rank, by_key, chunk in self.spans:
            ranks[by_key, chunk, self.nodes.node[rank]] += 1
        return {
            key
            for key, count in ranks.items()
            if count > 1
            and key[2] != self.nodes.node[self.layout(key[0]).owners[key[1]]]
            and self._spans_agree(*key)
        }

    def _spans_agree(self, by_key: bool, chunk: int, node: int) -> bool:
        """Whether some ranks of a node have partial results of the same heads."""
        seen: set[HeadRange] = set()
        for rank in self.nodes.members[node]:
            for span in self.spans.get((rank, by_key, chunk), ()):
                if span in seen:
                    return True
                seen.add(span)
        return False

    def _launch_wave(
        self, rank: int, tile: list[int], key: Key, wide: set[tuple[bool, int]]
    ) -> None:
        reads: dict[int, None] = {}
        writes: list[int] = []
        values = self.builder.values
        for by_key in (False, True):
            lines: dict[int, list[int]] = defaultdict(list)
            for block in tile:
                lines[self.chunks[by_key][block]].append(block)
            heads = self.heads[by_key]
            for chunk, blocks in lines.items():
                needed = {heads[block] for block in blocks}
                owned = self.layout(by_key).owners[chunk] == rank
                for tensor in self.moving(by_key):
                    came = self.came[rank, tensor, chunk]
                    for value in [self.own(tensor, chunk)] if owned else came:
                        first, last = values[value].head_start, values[value].head_stop
                        if any(first < stop and start < last for start, stop in needed):
                            reads[value] = None
                rows = len(self.layout(by_key).chunks[chunk])
                for span in self.spans[rank, by_key, chunk]:
                    cover = tuple(
                        sorted(
                            b for b in blocks if span[0] <= heads[b][0] and heads[b][1] <= span[1]
                        )
                    )
                    if not cover:
                        continue
                    for tensor in self.pass_.results:
                        if tensor.by_key == by_key:
                            value = self.builder.value(
                                Value(
                                    tensor, chunk, 0, rows, *span, rank,
                                    wide=(by_key, chunk) in wide, cover=cover,
                                )
                            )  # fmt: skip
                            self.partials[rank][tensor, chunk, span].append(value)
                            writes.append(value)
        self.builder.compute(rank, tile, reads, writes, key)

    # Results

    def _results_home(self, inner: set[tuple[bool, int, int]]) -> None:
        """Partial results of other ranks' chunks: added up inside a node, across once, home."""
        groups = self._foreign()
        mail = Mail(self.builder, self.nodes)
        pieces: list[_Piece] = []
        parts_of: list[dict[int, list[list[int]]]] = []
        for (lead, chunk, span, node), parts in sorted(groups.items(), key=lambda g: _order(g[0])):
            owner = self.layout(lead.by_key).owners[chunk]
            if node == self.nodes.node[owner]:
                for rank, found in parts.items():
                    bucket = self._bucket([rank], lead.by_key, chunk)
                    for number in self._one(rank, found, False, (WORK, bucket, self._end)):
                        self._home(mail, number, owner, (WORK, bucket, self._end + 1))
                continue
            group = [
                t for t in self.pass_.results if t is lead or (lead is Tensor.O and t is Tensor.LSE)
            ]
            row_bytes = sum(self.problem.widths.row_bytes(t) for t in group) * (span[1] - span[0])
            rows = len(self.layout(lead.by_key).chunks[chunk])
            demand = Demand(owner, (owner,), tuple(sorted(parts)), rows, row_bytes)
            pieces.append(_Piece(lead.by_key, chunk, span, demand, []))
            parts_of.append(parts)
        found_ways = ways([piece.demand for piece in pieces], self.nodes, self.how.message)
        added: dict[tuple[Key, int], tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
        for piece, each, parts in zip(pieces, found_ways, parts_of, strict=True):
            self._piece_home(mail, piece._replace(ways=each), parts, added)
        mail.post(self.how.grouped or self.how.together, self.how.together)
        for (key, rank), (reads, writes) in added.items():
            self.builder.merge(rank, reads, writes, (*key, rank))

    @property
    def _end(self) -> int:
        """Behind the launches of a wave in the order of issue."""
        return len(self.nodes.node)

    def _foreign(
        self,
    ) -> dict[tuple[Tensor, int, HeadRange, int], dict[int, list[list[int]]]]:
        """Partial results that are another rank's: by rank, the values of each tensor."""
        groups: dict[tuple[Tensor, int, HeadRange, int], dict[int, list[list[int]]]] = defaultdict(
            dict
        )
        for rank, held in self.partials.items():
            for tensor, chunk, span in list(held):
                if rank == self.layout(tensor.by_key).owners[chunk] or tensor is Tensor.LSE:
                    continue
                group = (tensor, Tensor.LSE) if tensor is Tensor.O else (tensor,)
                found = [held.pop((each, chunk, span)) for each in group]
                groups[tensor, chunk, span, self.nodes.node[rank]][rank] = found
        return groups

    def _bucket(self, ranks: Iterable[int], by_key: bool, chunk: int) -> int:
        """The wave after which results of a chunk can leave some ranks."""
        if self.how.together:
            return max(self.last.values())
        return max(self.last[rank, by_key, chunk] for rank in ranks)

    def _one(
        self, rank: int, groups: list[list[int]], wide: bool, key: Key, cuts: Sequence[Way] = ()
    ) -> list[int]:
        """One value of each tensor, or of each tensor and stripe, from the launches of a rank."""
        values = self.builder.values
        stripes: Sequence[tuple[int, int]] = [(w.row_start, w.row_stop) for w in cuts]
        first = values[groups[0][0]]
        stripes = stripes or [(first.row_start, first.row_stop)]
        if len(groups[0]) == 1 and len(stripes) == 1 and (first.wide == wide):
            return [parts[0] for parts in groups]
        written = []
        for start, stop in stripes:
            for parts in groups:
                cover = tuple(sorted(b for part in parts for b in values[part].cover))
                written.append(
                    self.builder.copy(
                        parts[0], rank, row_start=start, row_stop=stop, wide=wide, cover=cover
                    )
                )
        reads = [part for parts in groups for part in parts]
        if len(groups[0]) == 1:
            self.builder.local(LocalOp.PACK, rank, reads, written, key)
        else:
            self.builder.merge(rank, reads, written, key)
        return written

    def _piece_home(
        self,
        mail: Mail,
        piece: _Piece,
        parts: dict[int, list[list[int]]],
        added: dict[tuple[Key, int], tuple[list[int], list[int]]],
    ) -> None:
        values = self.builder.values
        bucket = self._bucket(parts, piece.by_key, piece.chunk)
        end, several = self._end, len(parts) > 1
        at_gateway: list[list[int]] = [[] for _ in piece.ways]
        for rank in sorted(parts):
            key = (WORK, bucket, end)
            made = self._one(rank, parts[rank], several, key, piece.ways)
            width = len(made) // len(piece.ways)
            for index, way in enumerate(piece.ways):
                for number in made[index * width : (index + 1) * width]:
                    moved = number
                    if way.far != rank:
                        moved = self.builder.copy(number, way.far)
                        mail.send((WORK, bucket, end + 1, 0), rank, way.far, number, moved)
                    at_gateway[index].append(moved)
        for index, way in enumerate(piece.ways):
            numbers = at_gateway[index]
            if several:
                reads, writes = added[(WORK, bucket + 1, end + 2), way.far]
                by_tensor: dict[Tensor, list[int]] = defaultdict(list)
                for number in numbers:
                    by_tensor[values[number].tensor].append(number)
                merged = []
                for same in by_tensor.values():
                    cover = tuple(sorted(b for n in same for b in values[n].cover))
                    merged.append(self.builder.copy(same[0], way.far, wide=False, cover=cover))
                reads += numbers
                writes += merged
                numbers = merged
            for number in numbers:
                crossed = self.builder.copy(number, way.near)
                mail.send((WORK, bucket + 1, end + 3, 0), way.far, way.near, number, crossed)
                if way.near == piece.demand.owner:
                    self._arrived(crossed)
                else:
                    self._home(mail, crossed, piece.demand.owner, (WORK, bucket + 1, end + 4))

    def _home(self, mail: Mail, number: int, owner: int, key: Key) -> None:
        """Inside the owner's node, to the owner."""
        rank = self.builder.values[number].rank
        copy = self.builder.copy(number, owner)
        mail.send((*key, 1), rank, owner, number, copy)
        self._arrived(copy)

    def _arrived(self, number: int) -> None:
        v = self.builder.values[number]
        self.partials[v.rank][v.tensor, v.chunk, (v.head_start, v.head_stop)].append(number)


def _order(key: tuple[Tensor, int, HeadRange, int]) -> tuple[int, int, HeadRange, int]:
    return key[0].code, key[1], key[2], key[3]


def _within(heads: HeadRange, spans: Iterable[HeadRange]) -> bool:
    return any(start <= heads[0] and heads[1] <= stop for start, stop in runs(spans))


def _atoms(spans: Iterable[Sequence[HeadRange]]) -> list[HeadRange]:
    """Cuts the union of head ranges at all of their edges."""
    each = [span for some in spans for span in some]
    cuts = sorted({cut for span in each for cut in span})
    whole = runs(each)
    return [pair for pair in pairwise(cuts) if _within(pair, whole)]
