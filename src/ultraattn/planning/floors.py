"""Turns a strategy and its blocks into a time that its program cannot beat, without building it.

Kernels cost what the tables say of the launches that the program would have; messages cost what
the links say of their bytes. What waits for what is kept as far as it is simple:

    ring           step s computes after its keys have come over s hops, one after another
    heads          all-to-all, then the launch, then all-to-all back
    allgather      all-gather, then one launch, then reduce-scatter
    direct         launches of the busiest rank; messages past the busiest stream

Left out are merges, copies, shared NICs and cores, and kernels slowed by transfers: all of them
only add.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ultraattn.chunks import Ints
from ultraattn.cluster.costs import Costs
from ultraattn.cluster.tables import Floats
from ultraattn.planning.setting import Setting
from ultraattn.planning.sizes import MOVED_IN, MOVED_OUT
from ultraattn.plans.check import Pass
from ultraattn.plans.program import Block
from ultraattn.plans.tensors import Tensor
from ultraattn.simulation.durations import Tiles, launch_seconds
from ultraattn.simulation.simulate import bound_s
from ultraattn.strategies import Strategy
from ultraattn.strategies.rings import lane_heads

MARGIN = 0.97
"""Of the launches of a direct program: it may have more launches than are counted here, which
tables that are not quite smooth can make faster by a little."""

TOGETHER = 1 << 17
"""Blocks of all assignments together whose floors are found at once."""


@dataclass(frozen=True)
class Columns:
    """Blocks as columns; `weight` counts visible pairs times heads."""

    q_chunk: Ints
    kv_chunk: Ints
    head_start: Ints
    head_stop: Ints
    kind: Ints
    weight: Ints

    @staticmethod
    def of(blocks: Sequence[Block]) -> Columns:
        """The same blocks."""
        rows = [
            (b.q_chunk, b.kv_chunk, b.head_start, b.head_stop, b.kind.code, b.weight)
            for b in blocks
        ]
        return Columns(*np.array(rows, dtype=np.int64).reshape(-1, 6).T)

    def repeated(self, count: int) -> Columns:
        """The same blocks so many times, one after another."""
        if count == 1:
            return self
        return Columns(*(np.tile(getattr(self, name), count) for name in self.__dataclass_fields__))

    @staticmethod
    def of_grid(made: Setting, heads: int) -> Columns:
        """The blocks of a mask that is the same for all heads, each of `heads` heads."""
        kinds, weights = made.grid.kinds[0, 0], made.grid.weights[0, 0]
        q, kv = np.nonzero(kinds)
        none = np.zeros(len(q), dtype=np.int64)
        return Columns(
            q.astype(np.int64), kv.astype(np.int64), none, none + heads,
            kinds[q, kv].astype(np.int64), weights[q, kv] * heads,
        )  # fmt: skip


@dataclass(frozen=True)
class Floors:
    """Least seconds of candidates of one pass over one setting."""

    pass_: Pass
    made: Setting
    nodes: tuple[int, ...]
    costs: Costs

    def of_rival(self, rival: Strategy) -> float:
        """Seconds that a rival's program takes at least."""
        problem, ranks = self.made.problem, self.made.q_layout.ranks
        if self.made.grid.heads > 1:
            return bound_s(str(self.pass_), problem, ranks, self.costs)
        if rival.name == "allgather":
            return self._allgather()
        if rival.name == "mesh":
            columns = self._whole
            width = rival.resolved(problem, ranks)[1]
            row = self._q_owner[columns.q_chunk] // width * width
            return self.direct(columns, row + self._kv_owner[columns.kv_chunk] % width)
        if rival.name == "double_ring":
            count = len(set(self.nodes))
            return self._rings(count, ranks // count, 1)
        lanes = rival.lanes(problem, ranks)
        return self._rings(1, ranks // lanes, lanes)

    # Direct transfers

    def direct(self, columns: Columns, ranks: Ints) -> float:
        """Seconds at least of the program in which ``ranks[b]`` computes block b."""
        return float(self.directs(columns, ranks[None])[0])

    def directs(self, columns: Columns, ranks: Ints) -> Floats:
        """Of each row of ranks, int64 (assignments, blocks), what `direct` gives."""
        count, blocks = ranks.shape
        if not blocks:
            return np.zeros(count)
        most = max(1, TOGETHER // blocks)
        found = [self._directs(columns, ranks[i : i + most]) for i in range(0, count, most)]
        return np.concatenate(found)

    def _directs(self, columns: Columns, ranks: Ints) -> Floats:
        """All at once, as if every assignment had ranks of its own."""
        count = len(ranks)
        many = columns.repeated(count)
        ranks = (ranks + np.arange(count)[:, None] * self._ranks).reshape(-1)
        work = self._launches(many, ranks, count)
        least: Floats = np.maximum(work * MARGIN, self._streams(many, ranks, count))
        return least

    def _launches(self, columns: Columns, ranks: Ints, count: int) -> Floats:
        """Kernel seconds of the busiest rank: a launch a foreign chunk, one for all own ones."""
        back = self.pass_ is Pass.BACKWARD
        chunk = columns.kv_chunk if back else columns.q_chunk
        layout = self.made.kv_layout if back else self.made.q_layout
        own = (self._kv_owner if back else self._q_owner)[chunk] == ranks % self._ranks
        wide = len(layout.chunks) + 1
        keys, launch = np.unique(ranks * wide + np.where(own, 0, chunk + 1), return_inverse=True)
        seconds = self._seconds(columns, launch.astype(np.int64), len(keys))
        total = np.bincount(keys // wide, weights=seconds, minlength=count * self._ranks)
        busiest: Floats = total.reshape(count, self._ranks).max(axis=1)
        return busiest

    def _streams(self, columns: Columns, ranks: Ints, count: int) -> Floats:
        """Seconds of messages past the busiest stream of any rank."""
        own, every = self._ranks, self._ranks * count
        node = np.asarray(self.nodes, dtype=np.int64)
        busy = np.zeros(4 * every)  # Sending inside, between; receiving inside, between.
        group = self.made.problem.group
        for by_key in (False, True):
            chunk = columns.kv_chunk if by_key else columns.q_chunk
            owner = self._kv_owner if by_key else self._q_owner
            sizes = self._kv_sizes if by_key else self._q_sizes
            away = np.flatnonzero(owner[chunk] != ranks % own)
            start, stop = columns.head_start[away], columns.head_stop[away]
            if by_key:
                start, stop = start // group, -(-stop // group)
            # One number for (rank, chunk, head range): each is needed once.
            most = self.made.problem.heads + 1
            code = ((ranks[away] * len(owner) + chunk[away]) * most + start) * most + stop
            code = np.unique(code)
            code, last = np.divmod(code, most)
            code, first = np.divmod(code, most)
            pairs, message = np.unique(code, return_inverse=True)
            heads = np.bincount(message, weights=last - first, minlength=len(pairs))
            there, moved = pairs // len(owner), pairs % len(owner)
            home = owner[moved]
            far = (node[there % own] != node[home]).astype(np.int64)
            home = there // own * own + home
            rows = sizes[moved] * heads
            ways = (
                (MOVED_IN[self.pass_][by_key], home, there),
                (MOVED_OUT[self.pass_][by_key], there, home),
            )
            for tensors, source, target in ways:
                seconds = self._message(rows * self._row(tensors), far)
                np.add.at(busy, far * every + source, seconds)
                np.add.at(busy, (2 + far) * every + target, seconds)
        fullest: Floats = busy.reshape(4, count, own).max(axis=(0, 2))
        return fullest

    # Rivals

    def _rings(self, nodes: int, places: int, lanes: int) -> float:
        """Rings of rings of lanes (`ultraattn.strategies.rings`), by its widest lane."""
        steps, problem = nodes * places, self.made.problem
        spans = lane_heads(problem.heads, lanes)
        lane = max(range(lanes), key=lambda u: spans[u][1] - spans[u][0])
        a, b = problem.kv_range(*spans[lane])
        at = np.arange(steps)
        rank = at * lanes + lane
        work = self._work(steps, lanes, spans[lane][1] - spans[lane][0])
        owned = np.bincount(self._kv_owner // lanes, weights=self._kv_sizes, minlength=steps)
        keys = owned * (b - a) * self._row((Tensor.K, Tensor.V))
        sums = owned * (b - a) * self._row((Tensor.DK, Tensor.DV), wide=True)
        before = at // places * places + (at % places - 1) % places
        outer_before = (at - places) % steps
        node = np.asarray(self.nodes)[rank]
        near_hop, far_hop = node[before] != node, node[outer_before] != node
        begun = self._to_heads(steps, lanes, lane)
        arrived, gate, stream = begun.copy(), begun.copy(), np.zeros((2, steps))
        done, home = begun, begun.copy()
        carried, window = np.zeros(steps), np.zeros(steps)
        for step in range(steps):
            outer, inner = divmod(step, places)
            origin = (at // places - outer) % nodes * places + (at % places - inner) % places
            if inner:
                hop = self._message(keys[origin], near_hop)
                arrived = np.maximum(arrived[before], arrived) + hop
                np.add.at(stream, (near_hop.astype(int), at), hop)
            elif step:
                hop = self._message(keys[origin], far_hop)
                gate = np.maximum(gate[outer_before], gate) + hop
                arrived = gate
                np.add.at(stream, (far_hop.astype(int), at), hop)
            done = np.maximum(done, arrived) + work[at, origin]
            if self.pass_ is Pass.FORWARD or steps == 1:
                continue
            sent = done if inner == 0 else np.maximum(done, window)
            if places > 1:
                hop = self._message(sums[origin[before]], near_hop)
                window = sent[before] + hop
                np.add.at(stream, (near_hop.astype(int), at), hop)
            else:
                window = sent
            if inner == places - 1:
                total = np.maximum(window, carried) if outer else window
                if nodes > 1:
                    total = total[outer_before] + self._message(sums.min() + 0 * total, far_hop)
                carried = home = total
        ends = np.maximum(np.maximum(done, home), begun + stream.max(axis=0))
        return float((ends + self._to_tokens(steps, lanes, lane)).max())

    def _work(self, steps: int, lanes: int, heads: int) -> Floats:
        """Kernel seconds of a lane by (position of the queries, position of the keys)."""
        columns = Columns.of_grid(self.made, heads)
        q, kv = self._q_owner[columns.q_chunk] // lanes, self._kv_owner[columns.kv_chunk] // lanes
        seconds = self._seconds(columns, q * steps + kv, steps * steps)
        return seconds.reshape(steps, steps)

    def _to_heads(self, steps: int, lanes: int, lane: int) -> Floats:
        """Seconds of the first all-to-all of each position: what its `lane` receives."""
        spans = lane_heads(self.made.problem.heads, lanes)
        a, b = self.made.problem.kv_range(*spans[lane])
        wide = spans[lane][1] - spans[lane][0]
        q, kv = MOVED_IN[self.pass_]
        tokens = self._tokens(self._q_owner, self._q_sizes) * wide * self._row(q)
        tokens += self._tokens(self._kv_owner, self._kv_sizes) * (b - a) * self._row(kv)
        return self._exchange(steps, lanes, lane, np.broadcast_to(tokens, (lanes, self._ranks)))

    def _to_tokens(self, steps: int, lanes: int, lane: int) -> Floats:
        """Seconds of the last all-to-all of each position: what `lane` receives back."""
        problem = self.made.problem
        columns = self._whole
        q, kv = MOVED_OUT[self.pass_]
        seen = np.isin(np.arange(len(self._q_owner)), columns.q_chunk)
        mine = self._tokens(self._q_owner, self._q_sizes * seen) * self._row(q)
        back = np.isin(np.arange(len(self._kv_owner)), columns.kv_chunk) | (steps > 1)
        keys = self._tokens(self._kv_owner, self._kv_sizes * back) * self._row(kv)
        rows = []
        for start, stop in lane_heads(problem.heads, lanes):
            a, b = problem.kv_range(start, stop)
            rows.append(mine * (stop - start) + keys * (b - a))
        # By lane that sends and rank that receives; `_exchange` wants the sender's size.
        received = np.stack(rows)
        sizes = received[:, np.arange(steps) * lanes + lane]
        spread = np.repeat(sizes[:, :, None], lanes, axis=2)
        out = np.zeros((lanes, self._ranks))
        for sender in range(lanes):
            out[lane, np.arange(steps) * lanes + sender] = spread[sender, :, 0]
        return self._exchange(steps, lanes, lane, out)

    def _exchange(self, steps: int, lanes: int, lane: int, sizes: Floats) -> Floats:
        """Seconds until rank `lane` of each position has ``sizes[lane, r]`` of its others r."""
        if lanes == 1:
            return np.zeros(steps)
        node = np.asarray(self.nodes)
        rank = np.arange(self._ranks)
        mine = rank // lanes * lanes + lane
        amount = np.where(rank == mine, 0.0, sizes[lane])
        far = node[rank] != node[mine]
        position = rank // lanes
        inside = np.bincount(position, weights=np.where(far, 0.0, amount), minlength=steps)
        between = np.bincount(position, weights=np.where(far, amount, 0.0), minlength=steps)
        link = self.costs
        seconds: Floats = np.maximum(link.inside.seconds(inside), link.between.seconds(between))
        return seconds

    def _allgather(self) -> float:
        """All keys to all ranks, a launch each, and back."""
        columns, kv_heads = self._whole, self.made.problem.kv_heads
        rank = self._q_owner[columns.q_chunk]
        work = self._seconds(columns, rank, self._ranks)
        owned = self._tokens(self._kv_owner, self._kv_sizes) * kv_heads
        seconds = self._shared(owned * self._row((Tensor.K, Tensor.V))) + float(work.max())
        if self.pass_ is Pass.BACKWARD and self._ranks > 1:
            seconds += self._shared(owned * self._row((Tensor.DK, Tensor.DV)))
        return seconds

    def _shared(self, owned: Floats) -> float:
        """Seconds to bring what every rank owns to all others; each byte enters a node once."""
        node = np.asarray(self.nodes)
        per_node = self._ranks / len(set(self.nodes))
        by_node = np.bincount(node, weights=owned)
        here = by_node[node] - owned
        there = owned.sum() - by_node[node]
        sharing = max(1.0, per_node / self.costs.nics_per_node)
        inside = self.costs.inside.seconds(here + there * (1 - 1 / per_node))
        between = self.costs.between.seconds(there / per_node * sharing // 1)
        return float(np.maximum(inside, between).max())

    # Parts

    @property
    def _ranks(self) -> int:
        return self.made.q_layout.ranks

    @cached_property
    def _whole(self) -> Columns:
        return Columns.of_grid(self.made, self.made.problem.heads)

    @cached_property
    def _q_owner(self) -> Ints:
        return np.array(self.made.q_layout.owners, dtype=np.int64)

    @cached_property
    def _kv_owner(self) -> Ints:
        return np.array(self.made.kv_layout.owners, dtype=np.int64)

    @cached_property
    def _q_sizes(self) -> Ints:
        return self.made.q_layout.chunks.sizes()

    @cached_property
    def _kv_sizes(self) -> Ints:
        return self.made.kv_layout.chunks.sizes()

    def _tokens(self, owner: Ints, sizes: Ints) -> Floats:
        counts = np.bincount(owner, weights=sizes, minlength=self._ranks)
        return counts.astype(np.float64)

    def _row(self, tensors: Sequence[Tensor], wide: bool = False) -> int:
        return sum(self.made.problem.widths.row_bytes(t, wide) for t in tensors)

    def _message(self, bytes_: Any, far: Any) -> Floats:
        inside, between = self.costs.inside, self.costs.between
        seconds: Floats = np.where(far, between.seconds(bytes_), inside.seconds(bytes_))
        return seconds

    def _seconds(self, columns: Columns, launch: Ints, launches: int) -> Floats:
        tiles = Tiles(
            launch, columns.q_chunk, columns.kv_chunk, columns.head_start, columns.head_stop,
            columns.kind, columns.weight,
        )  # fmt: skip
        return launch_seconds(
            str(self.pass_), self.made.problem, self.made.q_layout, self.made.kv_layout, tiles,
            launches, self.costs,
        )  # fmt: skip
