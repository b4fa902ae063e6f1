"""Finds the groups of a program's tasks that could become one, and that kernels and links take.

A note on launches. Candidates are sets of one rank's launches that share something:

    where its inputs come from      own queries with own keys; with rank 3's keys; ...
    what it waits for               launches that the same transfers let go
    a row, a column                 the blocks of one query chunk, of one key chunk
    a rectangle                     neighbouring rows x neighbouring columns, all present
    arrivals                        all that can run after the first 1, 2, 4, ... transfers

Where a kernel does not take the whole of such a set, the parts that it takes are proposed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ultraattn.errors import InputError
from ultraattn.masks.grid import BlockKind
from ultraattn.planning.fusion_graph import Group
from ultraattn.plans.program import (
    Block,
    CollectiveOp,
    Compute,
    Merge,
    Program,
    Task,
    TaskKind,
    Transfer,
    Value,
)


@dataclass(frozen=True)
class KernelLimits:
    """What one launch of several blocks may hold."""

    block_sets: bool = True
    """Any set of blocks; else rectangles only: every row with the same columns and heads."""
    max_blocks: int | None = None
    kinds: frozenset[BlockKind] = frozenset(BlockKind) - {BlockKind.EMPTY}
    """Kinds that may stand in a launch of several blocks."""

    def __post_init__(self) -> None:
        if self.max_blocks is not None and self.max_blocks < 1:
            raise InputError(f"max_blocks {self.max_blocks}: expected at least 1, or None")

    def takes(self, blocks: Sequence[Block]) -> bool:
        """Whether the kernel computes these blocks in one launch."""
        if len(blocks) <= 1:
            return True
        if self.max_blocks is not None and len(blocks) > self.max_blocks:
            return False
        if any(block.kind not in self.kinds for block in blocks):
            return False
        return self.block_sets or is_rectangle(blocks)


@dataclass(frozen=True)
class LinkLimits:
    """What one message or collective may hold."""

    collectives: frozenset[CollectiveOp] = frozenset()
    """Those that the transport has."""
    messages: bool = True
    """Whether transfers of the same source and targets may become one."""


def is_rectangle(blocks: Sequence[Block]) -> bool:
    """Whether blocks are every pair of some rows and some columns, of one head range."""
    rows = {block.q_chunk for block in blocks}
    columns = {block.kv_chunk for block in blocks}
    heads = {(block.head_start, block.head_stop) for block in blocks}
    cells = {(block.q_chunk, block.kv_chunk) for block in blocks}
    return len(heads) == 1 and len(cells) == len(blocks) == len(rows) * len(columns)


def candidates(program: Program, kernel: KernelLimits, link: LinkLimits) -> list[Group]:
    """Every group proposed, each once; launches rank by rank, then messages, then collectives."""
    found = dict.fromkeys(_launches(program, kernel))
    if link.messages:
        found |= dict.fromkeys(_messages(program))
    if link.collectives:
        found |= dict.fromkeys(_collectives(program, link.collectives))
    return list(found)


# Launches


def _launches(program: Program, kernel: KernelLimits) -> Iterable[Group]:
    by_rank: dict[int, list[Compute]] = defaultdict(list)
    for task in program.task_views:
        if isinstance(task, Compute):
            by_rank[task.rank].append(task)
    for rank in sorted(by_rank):
        for some in _sets_of(program, by_rank[rank]):
            for part in _taken(program, some, kernel):
                yield Group(tuple(sorted(task.index for task in part)), TaskKind.COMPUTE)


def _sets_of(program: Program, launches: Sequence[Compute]) -> Iterable[Sequence[Compute]]:
    waits = {task.index: arrivals(program, task) for task in launches}
    source = {t: frozenset(program.task_views[a].rank for a in waits[t]) for t in waits}

    def row(task: Compute) -> object:
        return frozenset(program.block_views[b].q_chunk for b in task.tile)

    def column(task: Compute) -> object:
        return frozenset(program.block_views[b].kv_chunk for b in task.tile)

    def origin(task: Compute) -> object:
        return tuple(sorted(_origins(program, task)))

    keys: tuple[Callable[[Compute], object], ...] = (
        origin,
        lambda task: waits[task.index],
        lambda task: source[task.index],
        row,
        column,
    )
    for key in keys:
        together: dict[object, list[Compute]] = defaultdict(list)
        for task in launches:
            together[key(task)].append(task)
        yield from together.values()
    yield from _rectangles(program, launches)
    yield from _by_arrivals(launches, waits)
    yield launches


def arrivals(program: Program, task: Task) -> frozenset[int]:
    """The transfers and collectives that a task waits for."""
    moves = (TaskKind.TRANSFER, TaskKind.COLLECTIVE)
    return frozenset(d for d in task.depends_on if program.task_views[d].kind in moves)


def _origins(program: Program, task: Task) -> set[tuple[bool, int]]:
    """(keys or queries, rank) that a launch has its inputs from."""
    found = set()
    for number in task.reads:
        value, producer = program.value_views[number], program.producers[number]
        rank = value.rank if producer < 0 else program.task_views[producer].rank
        found.add((value.tensor.by_key, rank))
    return found


def _rectangles(program: Program, launches: Sequence[Compute]) -> Iterable[list[Compute]]:
    """Pairs of neighbouring rows, and of columns, where both have the same other extent."""
    blocks = program.block_views
    cell: dict[tuple[int, int], list[Compute]] = defaultdict(list)
    for task in launches:
        if len(task.tile) == 1:
            cell[blocks[task.tile[0]].q_chunk, blocks[task.tile[0]].kv_chunk].append(task)
    rows = sorted({q for q, _ in cell})
    columns = sorted({k for _, k in cell})
    for height in _sizes(len(rows)):
        for width in _sizes(len(columns)):
            for top in range(0, len(rows), height):
                for left in range(0, len(columns), width):
                    places = [
                        (q, k)
                        for q in rows[top : top + height]
                        for k in columns[left : left + width]
                    ]
                    if all(place in cell for place in places):
                        yield [task for place in places for task in cell[place]]


def _sizes(count: int) -> list[int]:
    """1, 2, 4, ... below `count`, and `count`."""
    return [*(2**i for i in range(count.bit_length()) if 2**i < count), count]


def _by_arrivals(
    launches: Sequence[Compute], waits: Mapping[int, frozenset[int]]
) -> Iterable[list[Compute]]:
    """Launches that arrivals [0, 1), [1, 2), [2, 4), ... let go, and those that nothing holds."""
    order = {a: place for place, a in enumerate(sorted({a for w in waits.values() for a in w}))}
    ready = {t: max((order[a] for a in w), default=-1) for t, w in waits.items()}
    yield [task for task in launches if ready[task.index] < 0]
    low, high = 0, 1
    while low < len(order):
        yield [task for task in launches if low <= ready[task.index] < high]
        low, high = high, 2 * high


def _taken(
    program: Program, launches: Sequence[Compute], kernel: KernelLimits
) -> Iterable[list[Compute]]:
    """The whole where the kernel takes it; else runs of it, as long as the kernel takes."""
    blocks = program.block_views

    def fits(tasks: Sequence[Compute]) -> bool:
        return kernel.takes([blocks[b] for task in tasks for b in task.tile])

    if len(launches) < 2:
        return
    if fits(launches):
        yield list(launches)
        return
    run: list[Compute] = []
    for task in launches:
        if run and not fits([*run, task]):
            if len(run) > 1:
                yield run
            run = []
        run.append(task)
    if len(run) > 1 and fits(run):
        yield run


# Messages


def _targets(program: Program, task: Task) -> tuple[int, ...]:
    return tuple(sorted({program.value_views[v].rank for v in task.writes}))


def _transfers(program: Program) -> list[Transfer]:
    return [task for task in program.task_views if isinstance(task, Transfer)]


def _messages(program: Program) -> Iterable[Group]:
    """Transfers of one source and the same targets: all, of keys, of queries, read together."""
    results = {value for task in program.task_views if isinstance(task, Compute)
               for value in task.writes}  # fmt: skip
    merged = {v for task in program.task_views if task.kind is TaskKind.MERGE for v in task.writes}
    readers: dict[int, set[int]] = defaultdict(set)
    for task in program.task_views:
        for value in task.reads:
            readers[value].add(task.index)
    by_pair: dict[tuple[int, tuple[int, ...], bool], list[Transfer]] = defaultdict(list)
    for task in _transfers(program):
        partial = any(value in results or value in merged for value in task.reads)
        by_pair[task.rank, _targets(program, task), partial].append(task)
    for pair in sorted(by_pair):
        transfers = by_pair[pair]
        keys = [t for t in transfers if program.value_views[t.reads[0]].tensor.by_key]
        queries = [task for task in transfers if task not in keys]
        together: dict[frozenset[int], list[Transfer]] = defaultdict(list)
        for task in transfers:
            together[frozenset(r for v in task.writes for r in readers[v])].append(task)
        for run in [*_runs(transfers), *_runs(keys), *_runs(queries), *together.values()]:
            if len(run) > 1:
                yield Group(tuple(task.index for task in run), TaskKind.TRANSFER)


def _runs(transfers: Sequence[Transfer]) -> Iterable[Sequence[Transfer]]:
    """All, and neighbours by 2, 4, 8, ..."""
    yield transfers
    width = 2
    while width < len(transfers):
        yield from (transfers[i : i + width] for i in range(0, len(transfers), width))
        width *= 2


# Collectives


def _collectives(program: Program, allowed: frozenset[CollectiveOp]) -> Iterable[Group]:
    """Transfers of inputs that together are a broadcast, an all-gather or an all-to-all; of partial
    results, with the merges at their owners, a reduce-scatter.

    A transfer that waits for more than what it carries stays a transfer.
    """
    alone = [
        task
        for task in _transfers(program)
        if set(task.depends_on) <= {program.producers[v] for v in task.reads}
        and len(_targets(program, task)) == 1
    ]
    free = [t for t in alone if all(not program.value_views[v].cover for v in t.reads)]
    if CollectiveOp.REDUCE_SCATTER in allowed:
        yield from _reduce_scatters(program, alone)
    if CollectiveOp.BROADCAST in allowed:
        for tasks in _same_content(program, free).values():
            if len(tasks) > 1:
                yield _collective(tasks, CollectiveOp.BROADCAST)
    if CollectiveOp.ALL_GATHER in allowed:
        yield from _all_to_all_of(program, _whole_shares(program, free), CollectiveOp.ALL_GATHER)
    if CollectiveOp.ALL_TO_ALL in allowed:
        yield from _all_to_all_of(program, free, CollectiveOp.ALL_TO_ALL)


def _collective(tasks: Iterable[Transfer], op: CollectiveOp) -> Group:
    return Group(tuple(sorted(task.index for task in tasks)), TaskKind.TRANSFER, op)


def _same_content(
    program: Program, transfers: Sequence[Transfer]
) -> dict[tuple[object, ...], list[Transfer]]:
    """Transfers of one source that carry the same rows and heads, by what they carry."""
    found: dict[tuple[object, ...], list[Transfer]] = defaultdict(list)
    for task in transfers:
        extents = tuple(
            (v.tensor, v.chunk, v.row_start, v.row_stop, v.head_start, v.head_stop)
            for v in (program.value_views[number] for number in task.writes)
        )
        found[task.rank, task.reads, extents].append(task)
    return found


def _whole_shares(program: Program, transfers: Sequence[Transfer]) -> list[Transfer]:
    """Those that send the same to every other rank."""
    ranks = len({task.rank for task in transfers} | {r for t in transfers
                for r in _targets(program, t)})  # fmt: skip
    same = _same_content(program, transfers).values()
    return [task for tasks in same if len(tasks) == ranks - 1 for task in tasks]


def _all_to_all_of(
    program: Program, transfers: Sequence[Transfer], op: CollectiveOp
) -> Iterable[Group]:
    """One collective of all transfers, of queries and of keys, where every pair of ranks talks."""
    for by_key in (False, True):
        some = [t for t in transfers if program.value_views[t.reads[0]].tensor.by_key is by_key]
        pairs = {(t.rank, target) for t in some for target in _targets(program, t)}
        ranks = {rank for pair in pairs for rank in pair}
        if len(ranks) > 1 and len(pairs) == len(ranks) * (len(ranks) - 1):
            yield _collective(some, op)


def _reduce_scatters(program: Program, transfers: Sequence[Transfer]) -> Iterable[Group]:
    """Results of queries, and of keys, where every pair of ranks has a partial for the other."""
    values, producers = program.value_views, program.producers
    readers: dict[int, set[int]] = defaultdict(set)
    for task in program.task_views:
        for value in task.reads:
            readers[value].add(task.index)
    for by_key in (False, True):
        merges = {
            task.index: task
            for task in program.task_views
            if isinstance(task, Merge)
            and all(values[v].buffer < 0 and values[v].tensor.by_key is by_key for v in task.writes)
            and all(any(_alike(values[v], values[w]) for w in task.writes) for v in task.reads)
        }
        carried = {task.index: task for task in transfers}
        while True:  # Merges and transfers that belong to no others; each drop may cause another.
            lost = {
                index
                for index, task in carried.items()
                if not all(readers[v] and readers[v] <= merges.keys() for v in task.writes)
            }
            carried = {index: task for index, task in carried.items() if index not in lost}
            kept = {
                index: task
                for index, task in merges.items()
                if all(
                    values[v].rank == task.rank
                    and (
                        producers[v] in carried
                        or not isinstance(program.task_views[producers[v]], Transfer)
                    )
                    for v in task.reads
                )
                and any(producers[v] in carried for v in task.reads)
            }
            if not lost and len(kept) == len(merges):
                break
            merges = kept
        pairs = {(t.rank, target) for t in carried.values() for target in _targets(program, t)}
        ranks = {rank for pair in pairs for rank in pair}
        if len(ranks) > 1 and len(pairs) == len(ranks) * (len(ranks) - 1):
            tasks = tuple(sorted((*carried, *merges)))
            yield Group(tasks, TaskKind.TRANSFER, CollectiveOp.REDUCE_SCATTER)


def _alike(part: Value, whole: Value) -> bool:
    """Whether a partial result holds the rows and heads of a whole one, and no others."""
    return part[:6] == whole[:6]
