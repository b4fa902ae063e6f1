"""Turns a program and groups of its tasks into the graph in which each group is one task.

A note on partial results. Launches that become one give one partial result where each gave one:

    two launches                          one launch
    B0 ──► o of q, {B0} ─┐                B0 B1 ──► o of q, {B0, B1} ──► merge
    B1 ──► o of q, {B1} ─┴► merge

so merges read fewer parts; one that would only copy (a single part of the same rows, heads and
blocks) is left out, and the launch writes its result.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from ultraattn.planning.schedule_model import Jobs
from ultraattn.plans.builder import ProgramBuilder, stream_keys
from ultraattn.plans.problem import Problem
from ultraattn.plans.program import (
    COLLECTIVE_ORDER,
    LOCAL_ORDER,
    TASK_ORDER,
    Block,
    CollectiveOp,
    Program,
    StreamKind,
    TaskKind,
    Value,
)
from ultraattn.plans.tensors import Tensor


@dataclass(frozen=True)
class Group:
    """Tasks that become one: launches, messages, or (with `op`) messages as a collective.

    A reduce-scatter stands for the messages of partial results and the merges that read them.
    """

    tasks: tuple[int, ...]
    """Ascending."""
    kind: TaskKind
    op: CollectiveOp | None = None


@dataclass(frozen=True)
class Work:
    """A task, as far as its cost depends on it."""

    kind: TaskKind
    op: int
    """Code of `LocalOp` or `CollectiveOp`; -1 for other kinds."""
    rank: int
    blocks: tuple[Block, ...]
    reads: tuple[Value, ...]
    writes: tuple[Value, ...]


@dataclass
class Node:
    """A task of a graph that is being changed. Values are numbers of the graph's."""

    kind: TaskKind
    op: int
    rank: int
    reads: list[int]
    writes: list[int]
    after: list[int]
    """Tasks of the program that it waits for besides those that make what it reads."""
    tile: list[int]
    members: tuple[int, ...]
    """Tasks of the program that it stands for."""


@dataclass
class Graph:
    """Nodes in an order that respects dependencies; `before[i]` are nodes that node i waits for."""

    program: Program
    values: list[Value]
    nodes: list[Node]
    before: list[list[int]] = field(default_factory=list)

    def work(self, node: Node) -> Work:
        """What the cost of a node depends on."""
        blocks = self.program.block_views
        return Work(
            node.kind,
            node.op,
            node.rank,
            tuple(blocks[block] for block in node.tile),
            tuple(self.values[value] for value in node.reads),
            tuple(self.values[value] for value in node.writes),
        )

    def jobs(self, durations: Sequence[int], ranks_of_nodes: Sequence[int]) -> Jobs:
        """Jobs of the nodes; `ranks_of_nodes` gives each rank's node."""
        number: dict[tuple[int, StreamKind], int] = {}
        streams = []
        for node in self.nodes:
            keys = stream_keys(
                node.kind,
                node.rank,
                [self.values[v].rank for v in node.reads],
                [self.values[v].rank for v in node.writes],
                ranks_of_nodes,
            )
            streams.append([number.setdefault(key, len(number)) for key in keys])
        return Jobs.of(durations, streams, self.before)

    def finish(self, problem: Problem, ranks_of_nodes: Sequence[int]) -> Program:
        """The program of this graph, issued in its order."""
        builder = ProgramBuilder(problem, ranks_of_nodes)
        used = sorted({v for node in self.nodes for v in (*node.reads, *node.writes)})
        number = {old: builder.value(self.values[old]) for old in used}
        written = {v for node in self.nodes for v in node.writes}
        at: dict[int, int] = {}
        for place, node in enumerate(self.nodes):
            reads, writes = ([number[v] for v in vs] for vs in (node.reads, node.writes))
            key = (place,)
            if node.kind is TaskKind.COMPUTE:
                builder.compute(node.rank, node.tile, reads, writes, key)
            elif node.kind is TaskKind.TRANSFER:
                after = [at[task] for task in node.after if task in at]
                builder.transfer(node.rank, reads, writes, key, after)
            elif node.kind is TaskKind.COLLECTIVE:
                builder.collective(COLLECTIVE_ORDER[node.op], reads, writes, key)
            elif node.kind is TaskKind.MERGE:
                builder.merge(node.rank, reads, writes, key)
            else:
                builder.local(LOCAL_ORDER[node.op], node.rank, reads, writes, key)
            at |= dict.fromkeys(node.members, place)
        outputs = {number[v] for v in written if self.values[v].buffer < 0}
        # Blocks are those of the program: their columns serve as they are.
        return replace(builder.finish(frozenset(outputs)), blocks=self.program.blocks)


class Tasks:
    """The tasks of a program as plain lists, read once for many contractions."""

    def __init__(self, program: Program) -> None:
        tasks = program.tasks
        self.program = program
        self.reads, self.writes = tasks.reads.rows(), tasks.writes.rows()
        self.depends, self.tile = tasks.depends_on.rows(), tasks.tile.rows()
        self.kinds = [TASK_ORDER[kind] for kind in tasks.kind.tolist()]
        self.ops, self.ranks = tasks.op.tolist(), tasks.rank.tolist()
        self.readers: dict[int, list[int]] = defaultdict(list)
        for task, reads in enumerate(self.reads):
            for value in reads:
                self.readers[value].append(task)
        producers = program.producers
        self.after = [
            sorted(set(depends) - {producers[value] for value in reads})
            for depends, reads in zip(self.depends, self.reads, strict=True)
        ]

    def node(self, task: int) -> Node:
        """A task as it stands."""
        return Node(
            self.kinds[task], self.ops[task], self.ranks[task], self.reads[task],
            self.writes[task], self.after[task], self.tile[task], (task,),
        )  # fmt: skip


def contract(program: Program | Tasks, groups: Sequence[Group]) -> Graph | None:
    """The graph in which each group is one task; None where that cannot be.

    It cannot be where a group waits for itself through other tasks, or where partial results that
    would become one go to different tasks.
    """
    tasks = program if isinstance(program, Tasks) else Tasks(program)
    made = _Contraction(tasks, groups)
    return made.ordered() if made.join(range(len(tasks.kinds))) else None


def joined(tasks: Tasks, group: Group) -> tuple[Graph, Node] | None:
    """The task that a group becomes alone, in a graph without order; None where that cannot be."""
    merges = {
        reader
        for task in group.tasks
        for value in tasks.writes[task]
        for reader in tasks.readers[value]
        if tasks.kinds[reader] is TaskKind.MERGE
    }
    made = _Contraction(tasks, [group])
    if not made.join(sorted({*group.tasks, *merges})):
        return None
    return Graph(tasks.program, made.values, made.nodes), made.nodes[made.place[0]]


class _Contraction:
    def __init__(self, tasks: Tasks, groups: Sequence[Group]) -> None:
        self.tasks, self.program = tasks, tasks.program
        self.values = list(tasks.program.value_views)
        self.groups = groups
        self.group_of = {task: index for index, group in enumerate(groups) for task in group.tasks}
        self.renamed: dict[int, int] = {}
        self.nodes: list[Node] = []
        self.place: dict[int, int] = {}  # where each group stands in `nodes`

    def join(self, tasks: Iterable[int]) -> bool:
        """Makes the nodes of these tasks; False where a group cannot be one."""
        for task in tasks:
            node = self.tasks.node(task)
            group = self.group_of.get(task)
            if group is None:
                self.nodes.append(node)
            elif task == self.groups[group].tasks[0]:
                self.place[group] = len(self.nodes)
                self.nodes.append(node)
            else:
                self._absorb(self.nodes[self.place[group]], node)
        for index, wanted in enumerate(self.groups):
            if not self._finish(self.nodes[self.place[index]], wanted):
                return False
        self._rename()
        self._leave_out_copies()
        return True

    @staticmethod
    def _absorb(node: Node, other: Node) -> None:
        node.reads = list(dict.fromkeys([*node.reads, *other.reads]))
        node.writes = [*node.writes, *other.writes]
        node.after = sorted({*node.after, *other.after})
        node.tile = [*node.tile, *other.tile]
        node.members = (*node.members, *other.members)

    def _finish(self, node: Node, group: Group) -> bool:
        """Makes a node of joined tasks what its group says; False where that cannot be."""
        if group.op is CollectiveOp.REDUCE_SCATTER:
            # What the messages brought for the merges exists no longer.
            arrived = set(node.writes).intersection(node.reads)
            if any(set(self.tasks.readers[v]) - set(node.members) for v in arrived):
                return False
            node.reads = [v for v in node.reads if v not in arrived]
            node.writes = [v for v in node.writes if v not in arrived]
        if group.op is not None:
            node.kind, node.op = TaskKind.COLLECTIVE, COLLECTIVE_ORDER.index(group.op)
            node.rank = min(self.values[v].rank for v in (*node.reads, *node.writes))
        if node.kind is not TaskKind.COMPUTE:
            return True
        node.tile = sorted(node.tile)
        parts: dict[tuple[Tensor, int], list[int]] = defaultdict(list)
        for value in node.writes:
            parts[self.values[value].tensor, self.values[value].chunk].append(value)
        node.writes = []
        for numbers in parts.values():
            for same in _overlapping(numbers, self.values):
                if not self._join(node, same):
                    return False
        return True

    def _join(self, node: Node, parts: list[int]) -> bool:
        """Makes partial results one value, if one merge takes them all."""
        if len(parts) == 1:
            node.writes.append(parts[0])
            return True
        takers = {task for part in parts for task in self.tasks.readers[part]}
        if len(takers) != 1 or self.tasks.kinds[min(takers)] is not TaskKind.MERGE:
            return False
        views = [self.values[part] for part in parts]
        joined = views[0]._replace(
            head_start=min(v.head_start for v in views),
            head_stop=max(v.head_stop for v in views),
            cover=tuple(sorted({block for v in views for block in v.cover})),
        )
        number = len(self.values)
        self.values.append(joined)
        node.writes.append(number)
        self.renamed |= dict.fromkeys(parts, number)
        return True

    def _rename(self) -> None:
        if self.renamed:
            for node in self.nodes:
                if any(v in self.renamed for v in node.reads):
                    node.reads = list(dict.fromkeys(self.renamed.get(v, v) for v in node.reads))

    def _leave_out_copies(self) -> None:
        """Drops merges that would only copy what one joined launch wrote."""
        writer = {v: index for index in self.place.values() for v in self.nodes[index].writes}
        copies = set()
        for place, node in enumerate(self.nodes):
            source = self._copied(node)
            if source is None or any(v not in writer for v in source):
                continue
            copies.add(place)
            launch = self.nodes[writer[next(iter(source))]]
            launch.writes = [source.get(v, v) for v in launch.writes]
            launch.members = (*launch.members, *node.members)
        if copies:
            kept = [place for place in range(len(self.nodes)) if place not in copies]
            number = {old: new for new, old in enumerate(kept)}
            self.place = {group: number[place] for group, place in self.place.items()}
            self.nodes = [self.nodes[place] for place in kept]

    def _copied(self, node: Node) -> dict[int, int] | None:
        """The value that each part becomes, where a merge only copies parts of one launch."""
        if node.kind is not TaskKind.MERGE or len(node.reads) != len(node.writes):
            return None
        if any(read < len(self.program.values.rank) for read in node.reads):
            return None
        found: dict[int, int] = {}
        for written in node.writes:
            target = self.values[written]
            for read in node.reads:
                part = self.values[read]
                if target.buffer >= 0 and _same_extent(part, target):
                    found[read] = written
        return found if len(found) == len(node.writes) else None

    def ordered(self) -> Graph | None:
        """Nodes sorted so that each follows what it waits for; None where there is a cycle."""
        maker = {v: index for index, node in enumerate(self.nodes) for v in node.writes}
        stands = {task: index for index, node in enumerate(self.nodes) for task in node.members}
        before: list[set[int]] = []
        for index, node in enumerate(self.nodes):
            needs = {maker[v] for v in node.reads if v in maker}
            needs |= {stands[task] for task in node.after}
            inner = any(maker.get(v) == index for v in node.reads)
            before.append(needs if inner else needs - {index})
        later: list[list[int]] = [[] for _ in self.nodes]
        for index, needs in enumerate(before):
            for other in needs:
                later[other].append(index)
        waiting = [len(needs) for needs in before]
        ready = [(self.nodes[i].members[-1], i) for i, count in enumerate(waiting) if not count]
        heapq.heapify(ready)
        order: list[int] = []
        while ready:
            _, index = heapq.heappop(ready)
            order.append(index)
            for other in later[index]:
                waiting[other] -= 1
                if not waiting[other]:
                    heapq.heappush(ready, (self.nodes[other].members[-1], other))
        if len(order) < len(self.nodes):
            return None
        number = {old: new for new, old in enumerate(order)}
        return Graph(
            self.program,
            self.values,
            [self.nodes[old] for old in order],
            [sorted(number[other] for other in before[old]) for old in order],
        )


def _overlapping(numbers: Sequence[int], values: Sequence[Value]) -> list[list[int]]:
    """Values of one chunk by head range; ranges that overlap are together."""
    out: list[list[int]] = []
    stop = -1
    for number in sorted(numbers, key=lambda n: (values[n].head_start, n)):
        value = values[number]
        if out and value.head_start < stop:
            out[-1].append(number)
        else:
            out.append([number])
        stop = max(stop, value.head_stop)
    return out


def _same_extent(a: Value, b: Value) -> bool:
    return (a.tensor, a.chunk, a.row_start, a.row_stop, a.head_start, a.head_stop, a.cover) == (
        b.tensor, b.chunk, b.row_start, b.row_stop, b.head_start, b.head_stop, b.cover
    )  # fmt: skip
