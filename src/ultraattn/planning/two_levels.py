"""Assigns blocks to nodes first, then to the ranks of each node: the layers of the tiling.

Between nodes the ledger counts a chunk once a node; inside a node a foreign chunk counts as owned
by the rank in its owner's place, where it enters. Starts of both levels are structured, and
levelled where they are uneven:

    nodes    rows, meshes of nodes, what a search over nodes finds
    ranks    every mesh of (head parts, rows, columns) inside each node

What is worth building is told by a rough time (`Sketch.seconds`); simulated time decides later.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ultraattn.chunks import Ints
from ultraattn.cluster.costs import Costs
from ultraattn.planning.ledger import NO_RANK, Bools, TilingProblem
from ultraattn.planning.repair import repair
from ultraattn.planning.routes import Nodes
from ultraattn.planning.setting import Setting
from ultraattn.planning.sizes import MOVED_IN, MOVED_OUT
from ultraattn.planning.starts import divisors, structured_starts
from ultraattn.planning.tiling import Effort
from ultraattn.plans.check import Pass
from ultraattn.simulation.durations import Tiles, launch_seconds

Mesh = tuple[int, int, int]
"""Head parts, height and width inside a node."""

MOST_NODE_STARTS = 3
UNEVEN = 1.05
"""Loads over the mean, beyond which ranks of a node are levelled."""
PROPOSALS = {Effort.INSTANT: 0, Effort.FAST: 40_000, Effort.NORMAL: 150_000, Effort.BEST: 1_000_000}
"""Of the search over nodes."""


@dataclass(frozen=True, eq=False)
class NodeStart:
    """The node of every (head part, query chunk, key chunk), -1 where nothing is visible."""

    name: str
    node: Ints

    @property
    def parts(self) -> int:
        """Head parts that nodes split."""
        return len(self.node)


@dataclass(frozen=True, eq=False)
class Levels:
    """One pass over one setting, seen by node.

    Attributes:
        tiling: the tiling problem of the pass with one head range.
    """

    pass_: Pass
    made: Setting
    nodes: Nodes
    tiling: TilingProblem

    @property
    def count(self) -> int:
        """Nodes."""
        return len(self.nodes.members)

    @property
    def per_node(self) -> int:
        """Ranks of a node."""
        return len(self.nodes.members[0])

    @cached_property
    def _node(self) -> Ints:
        return np.array(self.nodes.node, dtype=np.int64)

    @cached_property
    def _place(self) -> Ints:
        return np.array(self.nodes.place, dtype=np.int64)

    @cached_property
    def between(self) -> TilingProblem:
        """The problem of nodes: what it is to have ranks, with the load cap of all of a node's."""
        t = self.tiling
        return replace(
            t,
            ranks=self.count,
            q_owner=self._node[t.q_owner],
            kv_owner=self._node[t.kv_owner],
            cap=t.cap * self.per_node,
            node=None,
        )

    def inside(self, weight: Ints, ratio: float) -> TilingProblem:
        """The problem of a node's ranks, for the blocks of positive `weight`."""
        t = self.tiling
        mean = -(-int(weight.sum()) // self.per_node)
        cap = max(int(mean * ratio), int(weight.max(initial=0)))
        return replace(
            t,
            ranks=self.per_node,
            weight=weight,
            q_owner=self._place[t.q_owner],
            kv_owner=self._place[t.kv_owner],
            cap=max(cap, 1),
            node=None,
        )

    def node_starts(self, effort: Effort, most_heads: int) -> list[NodeStart]:
        """Assignments to nodes, the rows of each node's own queries first."""
        problem = self.between
        own = np.where(problem.weight > 0, problem.q_owner[None, :, None], NO_RANK)
        starts = [NodeStart("node rows", own)]
        free = np.full(len(problem.blocks), NO_RANK, dtype=np.int64)
        found = structured_starts(problem, free, repairs=2)
        if found and PROPOSALS[effort]:
            from ultraattn.planning.improve import improve

            proposals = min(PROPOSALS[effort], 2_000 * len(problem.blocks))
            best = improve(problem, free, found, 0, proposals, 2, 1)
            found = [best, *found]
        for one in found:
            if not any(np.array_equal(one.assignment, s.node) for s in starts):
                starts.append(NodeStart(f"nodes: {one.origin}", one.assignment))
        return [*starts[: MOST_NODE_STARTS + 1], *self._head_starts(most_heads)]

    def _head_starts(self, most_heads: int) -> list[NodeStart]:
        """Nodes that split the heads, each head part among nodes by rows."""
        problem, out = self.between, []
        for parts in divisors(self.count)[1:]:
            if parts <= most_heads:
                group = self.count // parts
                first = np.arange(parts)[:, None, None] * group
                node = first + problem.q_owner[None, :, None] % group
                where = np.where(problem.weight > 0, node, NO_RANK)
                out.append(NodeStart(f"nodes: heads {parts} x {group} rows", where))
        return out

    def places(self, mesh: Mesh) -> tuple[Ints, Ints]:
        """Row and column of each query and key chunk in a node's mesh."""
        _, height, width = mesh
        q, kv = self._place[self.tiling.q_owner], self._place[self.tiling.kv_owner]
        return q % (height * width) // width, kv % width

    def meshes(self, most_heads: int) -> list[Mesh]:
        """Every (head parts, height, width) that a node's ranks and the heads allow."""
        return [
            (parts, height, self.per_node // parts // height)
            for parts in divisors(self.per_node)
            if parts <= most_heads
            for height in divisors(self.per_node // parts)
        ]

    def ranks(self, start: NodeStart, mesh: Mesh) -> Ints:
        """The rank of every (head part, query chunk, key chunk), levelled inside nodes.

        Head parts of nodes come first, those inside a node second.
        """
        parts, _, width = mesh
        row, column = self.places(mesh)
        group = self.per_node // parts
        cell = row[:, None] * width + column[None, :]
        members = np.array(self.nodes.members, dtype=np.int64)
        out = np.full((start.parts, parts, *cell.shape), NO_RANK, dtype=np.int64)
        weight = self.tiling.weight[0]
        for index, node in enumerate(start.node):
            for number in np.unique(node[node >= 0]).tolist():
                mine = node == number
                level = self._levelled(
                    np.where(mine, weight, 0), np.where(mine, cell, NO_RANK), group
                )
                for part in range(parts):
                    out[index, part][mine] = members[number][part * group + level[mine]]
        return out.reshape(start.parts * parts, *cell.shape)

    def _levelled(self, weight: Ints, cell: Ints, group: int) -> Ints:
        """Cells of a node's mesh with their loads evened out, all head parts alike."""
        load = np.bincount(cell[cell >= 0], weights=weight[cell >= 0], minlength=group)
        if group == 1 or load.max() * group <= UNEVEN * load.sum():
            return cell
        problem = self.inside(weight[None], UNEVEN)
        cap = max(int(-(-int(weight.sum()) // group) * UNEVEN), int(weight.max()))
        problem = replace(
            problem,
            ranks=group,
            q_owner=problem.q_owner % group,
            kv_owner=problem.kv_owner % group,
            cap=cap,
        )
        free = np.full(len(problem.blocks), NO_RANK, dtype=np.int64)
        fixed = repair(problem, cell[None], free)
        return cell if fixed is None else fixed[0]


@dataclass(frozen=True, eq=False)
class Sketch:
    """A two-level assignment before its blocks are placed, and roughly how long it takes."""

    start: NodeStart
    mesh: Mesh
    seconds: float
    crossing_s: float
    """Of the busiest node's NICs."""

    @property
    def head_groups(self) -> int:
        """Head ranges of its blocks."""
        return self.start.parts * self.mesh[0]

    @property
    def name(self) -> str:
        """For notes."""
        parts, height, width = self.mesh
        return f"{self.start.name}, {parts} x {height} x {width} inside"


def sketches(
    levels: Levels, costs: Costs, effort: Effort, head_groups: Sequence[int], refined: int
) -> list[Sketch]:
    """Two-level assignments, those that seem fastest first.

    The first `refined` get their kernels' time from the launches that they would have; the others,
    told by rates alone, are left out.
    """
    rough: list[tuple[float, int, NodeStart, Mesh, tuple[float, float]]] = []
    most = max(head_groups)
    for start in levels.node_starts(effort, most):
        crossing = _crossing(levels, costs, start)
        for mesh in levels.meshes(most // start.parts):
            if mesh[0] * start.parts in head_groups:
                seconds = _seconds(levels, costs, start, mesh, crossing, None)
                rough.append((round(seconds, 9), len(rough), start, mesh, crossing))
    found = []
    for _, _, start, mesh, crossing in sorted(rough, key=lambda r: r[:2])[:refined]:
        kernels = _launches_s(levels, costs, start, mesh)
        seconds = _seconds(levels, costs, start, mesh, crossing, kernels)
        # Whole nanoseconds, so that nothing hangs on how a machine rounds.
        found.append(Sketch(start, mesh, round(seconds, 9), sum(crossing)))
    return sorted(found, key=lambda sketch: sketch.seconds)


def _launches_s(levels: Levels, costs: Costs, start: NodeStart, mesh: Mesh) -> float:
    """Kernel seconds of the busiest rank: a launch for each node that its inputs come from."""
    made, grid, node = levels.made, levels.made.grid, levels._node
    problem, parts = made.problem, mesh[0] * start.parts
    ranks = levels.ranks(start, mesh)[0]  # The first head part; the others are like it.
    q, kv = np.nonzero(ranks >= 0)
    rank = ranks[q, kv]
    wave = np.zeros(len(q), dtype=np.int64)
    for owner in (levels.tiling.q_owner[q], levels.tiling.kv_owner[kv]):
        away = (node[rank] - node[owner]) % levels.count
        wave = np.maximum(wave, np.where(owner == rank, 0, 1 + away))
    keys, launch = np.unique(rank * (levels.count + 1) + wave, return_inverse=True)
    heads = max(1, problem.heads // parts)
    none = np.zeros(len(q), dtype=np.int64)
    tiles = Tiles(
        launch.astype(np.int64), q, kv, none, none + heads,
        grid.kinds[0].max(axis=0)[q, kv].astype(np.int64),
        grid.weights[0].max(axis=0)[q, kv] * heads,
    )  # fmt: skip
    seconds = launch_seconds(
        str(levels.pass_), problem, made.q_layout, made.kv_layout, tiles, len(keys), costs
    )
    return float(np.bincount(keys // (levels.count + 1), weights=seconds).max(initial=0.0))


def _line_bytes(levels: Levels) -> tuple[Ints, Ints, Ints, Ints]:
    """Bytes in and out of every query chunk and every key chunk, all heads."""
    problem, widths = levels.made.problem, levels.made.problem.widths
    out = []
    for side, heads, layout in (
        (0, problem.heads, levels.made.q_layout),
        (1, problem.kv_heads, levels.made.kv_layout),
    ):
        for moved in (MOVED_IN, MOVED_OUT):
            row = sum(widths.row_bytes(t) for t in moved[levels.pass_][side])
            out.append(layout.chunks.sizes() * (row * heads))
    return out[0], out[1], out[2], out[3]


def _needed(where: Ints, count: int, by_key: bool) -> Bools:
    """Whether each of `count` groups has a block of each chunk: bool (count, chunks)."""
    q, kv = np.nonzero(where >= 0)
    chunk = kv if by_key else q
    out = np.zeros((count, where.shape[1 if by_key else 0]), dtype=np.bool_)
    out[where[q, kv], chunk] = True
    return out


def _crossing(levels: Levels, costs: Costs, start: NodeStart) -> tuple[float, float]:
    """Seconds of the busiest node's NICs, evenly used: beside the kernels, and after them.

    Inputs cross beside kernels, and so do gradients of keys, but for the last node's; results of
    queries leave when all of their keys have been there.
    """
    q_in, q_out, kv_in, kv_out = _line_bytes(levels)
    t, count = levels.between, levels.count
    beside, after = np.zeros((2, count)), np.zeros((2, count))
    sides = ((False, t.q_owner, q_in, q_out), (True, t.kv_owner, kv_in, kv_out))
    for node, (by_key, owner, into, out) in itertools.product(start.node, sides):
        need = _needed(node, count, by_key)
        need[owner, np.arange(len(owner))] = False
        for arrives, size in ((True, into), (False, out)):
            here = (need * size).sum(axis=1)
            there = np.bincount(owner, weights=need.sum(axis=0) * size, minlength=count)
            both = np.stack((here, there) if arrives else (there, here))
            if arrives or by_key:
                beside += both
            if not arrives:
                after += both / count if by_key else both
    nics = min(costs.nics_per_node, levels.per_node)
    most = np.array([beside.max(), after.max()]) / nics / start.parts
    each = costs.between.seconds(most)
    return float(each[0]), float(each[1]) if after.any() else 0.0


def _seconds(
    levels: Levels,
    costs: Costs,
    start: NodeStart,
    mesh: Mesh,
    crossing: tuple[float, float],
    kernels_s: float | None,
) -> float:
    """Rough: the longest of kernels, NICs and inner links, and a share of the others."""
    parts, height, width = mesh
    row, column = levels.places(mesh)
    group = height * width
    count = levels.count * group
    weight = levels.tiling.weight[0]
    load = np.zeros(count)
    moved, fan = np.zeros(levels.count), 0
    q_in, q_out, kv_in, kv_out = _line_bytes(levels)
    for node in start.node:
        cell = np.where(node >= 0, node * group + row[:, None] * width + column[None, :], NO_RANK)
        shown = cell >= 0
        load += np.bincount(cell[shown], weights=weight[shown], minlength=count)
        for by_key, into, out in ((False, q_in, q_out), (True, kv_in, kv_out)):
            need = _needed(cell, count, by_key)
            users = need.reshape(levels.count, group, -1).sum(axis=1)
            # Results with several users in a node are kept wide until they are added up.
            again = np.where(users > 1, 2, 1)
            moved += (need * into).sum(axis=1).reshape(-1, group).max(axis=1)
            moved += (users * again * out).sum(axis=1) / group
            fan = max(fan, int(users.max(initial=0)) * parts)
    by_node = load.reshape(-1, group)
    even = np.maximum(by_node.mean(axis=1) * UNEVEN, 0)
    busiest = float(np.minimum(by_node.max(axis=1), even).max()) / (parts * start.parts)
    kernels = _kernel_s(levels, costs, start, mesh, busiest) if kernels_s is None else kernels_s
    inside = float(costs.inside.seconds(moved.max() / (parts * start.parts)))
    starts = costs.inside.start_s * fan + costs.between.start_s * levels.count
    times = sorted((kernels, crossing[0], inside))
    return times[2] + 0.3 * times[1] + 0.1 * times[0] + crossing[1] + starts


def _kernel_s(levels: Levels, costs: Costs, start: NodeStart, mesh: Mesh, load: float) -> float:
    """Seconds of so many pairs (times heads) at the rate of a launch that holds a node's wave."""
    parts, height, width = mesh
    problem = levels.made.problem
    q = max(1.0, problem.q_len / levels.count / height)
    kv = max(1.0, problem.kv_len / levels.count / width)
    heads = max(1.0, problem.heads / parts / start.parts)
    factor = costs.width_factor(problem.head_dim, problem.value_dim, problem.dtype)
    best = np.inf
    for kernel in costs.kernels:
        if kernel.table(str(levels.pass_), "full") is not None:
            body = float(costs.bodies(kernel, str(levels.pass_), q, kv, heads, 1.0, False, factor))
            best = min(best, (body + kernel.start_s(str(levels.pass_))) / (q * kv * heads))
    return load * best
