"""Proves a program sound without running it: nothing lost, nothing twice, nothing that can hang.

Each rule is one function over a `_Facts` that raises `PlanError` with the rule's name first. The
rules stand in the order in which a fault is easiest to read: places before order, order before
coverage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from ultraattn.enums import StrEnum
from ultraattn.errors import PlanError
from ultraattn.plans.builder import stream_keys
from ultraattn.plans.layout import Layout
from ultraattn.plans.problem import Problem
from ultraattn.plans.program import (
    Block,
    Collective,
    CollectiveOp,
    Compute,
    Local,
    LocalOp,
    Merge,
    Program,
    StreamKind,
    Task,
    Transfer,
    Value,
)
from ultraattn.plans.tensors import Tensor

SENDS = (StreamKind.SEND, StreamKind.SEND_BETWEEN_NODES)
RECEIVES = (StreamKind.RECEIVE, StreamKind.RECEIVE_BETWEEN_NODES)


class Pass(StrEnum):
    """Which way a program runs."""

    FORWARD = "forward"
    BACKWARD = "backward"

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """Tensors that a rank owns when the pass begins."""
        if self is Pass.FORWARD:
            return (Tensor.Q, Tensor.K, Tensor.V)
        return (Tensor.Q, Tensor.K, Tensor.V, Tensor.O, Tensor.LSE, Tensor.DO)

    @property
    def needs(self) -> tuple[Tensor, ...]:
        """Tensors that the kernel of a block reads."""
        if self is Pass.FORWARD:
            return (Tensor.Q, Tensor.K, Tensor.V)
        return (Tensor.Q, Tensor.K, Tensor.V, Tensor.DO, Tensor.LSE, Tensor.DELTA)

    @property
    def results(self) -> tuple[Tensor, ...]:
        """Tensors that the pass gives back to the owners."""
        if self is Pass.FORWARD:
            return (Tensor.O, Tensor.LSE)
        return (Tensor.DQ, Tensor.DK, Tensor.DV)


@dataclass(frozen=True)
class _Facts:
    """What the rules look at."""

    pass_: Pass
    problem: Problem
    q_layout: Layout
    kv_layout: Layout
    nodes: Sequence[int]
    program: Program

    @property
    def blocks(self) -> Sequence[Block]:
        return self.program.block_views

    @property
    def values(self) -> Sequence[Value]:
        return self.program.value_views

    @property
    def tasks(self) -> Sequence[Task]:
        return self.program.task_views

    def layout(self, tensor: Tensor) -> Layout:
        return self.kv_layout if tensor.by_key else self.q_layout

    def heads(self, block: int, tensor: Tensor) -> tuple[int, int]:
        b = self.blocks[block]
        if tensor.by_key:
            return self.problem.kv_range(b.head_start, b.head_stop)
        return b.head_start, b.head_stop

    def rows_of(self, block: int, tensor: Tensor) -> int:
        b = self.blocks[block]
        return b.kv_chunk if tensor.by_key else b.q_chunk

    @cached_property
    def line_blocks(self) -> dict[tuple[bool, int], list[int]]:
        """Blocks of each query chunk (False, chunk) and key chunk (True, chunk)."""
        lines: dict[tuple[bool, int], list[int]] = defaultdict(list)
        for index, block in enumerate(self.blocks):
            lines[False, block.q_chunk].append(index)
            lines[True, block.kv_chunk].append(index)
        return lines

    def fail(self, rule: str, text: str) -> PlanError:
        return PlanError(f"{self.pass_} pass, {rule}: {text}")

    def name(self, task: int) -> str:
        view = self.tasks[task]
        return f"task {task} ({view.kind} on rank {view.rank})"


def check_program(
    pass_: Pass,
    problem: Problem,
    q_layout: Layout,
    kv_layout: Layout,
    nodes: Sequence[int],
    program: Program,
) -> None:
    """Raises PlanError, naming the rule and the task or value, where the program is unsound."""
    facts = _Facts(pass_, problem, q_layout, kv_layout, nodes, program)
    for rule in (
        _numbers_in_range,
        _blocks_are_the_mask,
        _values_have_one_source,
        _places,
        _streams_hold_each_task,
        _same_order_on_both_ranks,
        _no_cycle,
        _inputs_are_there,
        _each_block_computed_once,
        _tile_inputs_complete,
        _tile_outputs_complete,
        _merges_disjoint,
        _partials_used_once,
        _results_complete,
        _buffers_not_shared_in_time,
    ):
        rule(facts)


def _numbers_in_range(facts: _Facts) -> None:
    program = facts.program
    limits = {
        "value read": (program.tasks.reads.items, len(facts.values)),
        "value written": (program.tasks.writes.items, len(facts.values)),
        "dependency": (program.tasks.depends_on.items, len(facts.tasks)),
        "block of a tile": (program.tasks.tile.items, len(facts.blocks)),
        "block of a cover": (program.values.cover.items, len(facts.blocks)),
        "task of a stream": (program.streams.tasks.items, len(facts.tasks)),
        "rank of a task": (program.tasks.rank, facts.q_layout.ranks),
        "rank of a value": (program.values.rank, facts.q_layout.ranks),
        "rank of a stream": (program.streams.rank, facts.q_layout.ranks),
        "rank of a buffer": (program.buffers.rank, facts.q_layout.ranks),
        "query chunk of a block": (program.blocks.q_chunk, len(facts.q_layout.chunks)),
        "key chunk of a block": (program.blocks.kv_chunk, len(facts.kv_layout.chunks)),
        "last head of a block": (program.blocks.head_stop, facts.problem.heads + 1),
    }
    for what, (items, limit) in limits.items():
        if items.size and (int(items.min()) < 0 or int(items.max()) >= limit):
            bad = int(items.min()) if int(items.min()) < 0 else int(items.max())
            raise facts.fail("numbers in range", f"{what} is {bad}, expected 0 to {limit - 1}")
    for index, value in enumerate(facts.values):
        layout = facts.layout(value.tensor)
        if not 0 <= value.chunk < len(layout.chunks):
            raise facts.fail("numbers in range", f"value {index} names chunk {value.chunk}")
        rows, heads = len(layout.chunks[value.chunk]), facts.problem.heads_of(value.tensor)
        if not (0 <= value.row_start <= value.row_stop <= rows) or not (
            0 <= value.head_start < value.head_stop <= heads
        ):
            raise facts.fail(
                "numbers in range", f"value {index}, {value.place()}, of {rows} rows, {heads} heads"
            )


def _blocks_are_the_mask(facts: _Facts) -> None:
    seen: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
    total = 0
    for index, block in enumerate(facts.blocks):
        total += block.weight
        for start, stop, other in seen[block.q_chunk, block.kv_chunk]:
            if start < block.head_stop and block.head_start < stop:
                raise facts.fail("blocks", f"blocks {other} and {index} hold the same pairs")
        seen[block.q_chunk, block.kv_chunk].append((block.head_start, block.head_stop, index))
    if total != facts.problem.visible_pairs:
        raise facts.fail(
            "blocks",
            f"blocks hold {total} visible pairs, the mask has {facts.problem.visible_pairs}: "
            "a block is missing, invented, or mis-weighed",
        )


def _values_have_one_source(facts: _Facts) -> None:
    writer: dict[int, int] = {}
    for task in facts.tasks:
        for value in task.writes:
            if value in writer:
                raise facts.fail(
                    "one source a value",
                    f"value {value} is written by {facts.name(writer[value])} and "
                    f"{facts.name(task.index)}",
                )
            writer[value] = task.index
    for index, value in enumerate(facts.values):
        if index in writer:
            continue
        owner = facts.layout(value.tensor).owners[value.chunk]
        if value.tensor not in facts.pass_.inputs or value.rank != owner or value.cover:
            raise facts.fail(
                "one source a value",
                f"nothing writes {value.place()}, and it is no input that the rank owns",
            )


def _places(facts: _Facts) -> None:
    for task in facts.tasks:
        if isinstance(task, (Transfer, Collective)):
            _check_copies(facts, task)
            continue
        for value in (*task.reads, *task.writes):
            if facts.values[value].rank != task.rank:
                raise facts.fail(
                    "places",
                    f"{facts.name(task.index)} uses {facts.values[value].place()}, "
                    "which is on another rank",
                )


def _check_copies(facts: _Facts, task: Task) -> None:
    reads = [facts.values[value] for value in task.reads]
    if isinstance(task, Transfer):
        for read in reads:
            if read.rank != task.rank:
                raise facts.fail("places", f"{facts.name(task.index)} sends {read.place()}")
    if isinstance(task, Collective) and task.op is CollectiveOp.REDUCE_SCATTER:
        return
    used = [False] * len(reads)
    for number in task.writes:
        value = facts.values[number]
        if isinstance(task, Transfer) and value.rank == task.rank:
            raise facts.fail(
                "places", f"{facts.name(task.index)} sends {value.place()} to its own rank"
            )
        sources = [i for i, read in enumerate(reads) if read.holds(value)]
        if not sources:
            raise facts.fail(
                "both ends",
                f"{facts.name(task.index)} delivers {value.place()}, which it does not carry",
            )
        for i in sources:
            used[i] = True
    for i, read in enumerate(reads):
        if not used[i]:
            raise facts.fail(
                "both ends", f"{facts.name(task.index)} sends {read.place()}, nobody receives it"
            )


def _streams_hold_each_task(facts: _Facts) -> None:
    found: dict[int, list[tuple[int, StreamKind]]] = defaultdict(list)
    named = set()
    for stream in facts.program.stream_views:
        if (stream.rank, stream.kind) in named:
            raise facts.fail("streams", f"rank {stream.rank} has two {stream.kind} streams")
        named.add((stream.rank, stream.kind))
        for task in stream.tasks:
            found[task].append((stream.rank, stream.kind))
    for task in facts.tasks:
        expected = stream_keys(
            task.kind,
            task.rank,
            [facts.values[v].rank for v in task.reads],
            [facts.values[v].rank for v in task.writes],
            facts.nodes,
        )
        have = sorted(found[task.index])
        if have != sorted(expected):
            raise facts.fail(
                "streams",
                f"{facts.name(task.index)} stands on streams {_named(have)}, expected "
                f"{_named(expected)}: both ends of a transfer must know of it, once",
            )


def _named(keys: Iterable[tuple[int, StreamKind]]) -> str:
    return ", ".join(f"{kind} of rank {rank}" for rank, kind in keys) or "none"


def _same_order_on_both_ranks(facts: _Facts) -> None:
    sent: dict[tuple[int, int], list[int]] = defaultdict(list)
    received: dict[tuple[int, int], list[int]] = defaultdict(list)
    for stream in facts.program.stream_views:
        for index in stream.tasks:
            task = facts.tasks[index]
            if not isinstance(task, Transfer):
                continue
            if stream.kind in RECEIVES:
                received[task.rank, stream.rank].append(index)
            elif stream.kind in SENDS:
                for target in {facts.values[v].rank for v in task.writes}:
                    sent[task.rank, target].append(index)
    for pair in sorted(sent.keys() | received.keys()):
        between = facts.nodes[pair[0]] != facts.nodes[pair[1]]
        if sent[pair] != received[pair]:
            raise facts.fail(
                "one order",
                f"rank {pair[0]} sends tasks {sent[pair]} to rank {pair[1]}"
                f"{' between nodes' if between else ''}, which receives {received[pair]}",
            )


def _no_cycle(facts: _Facts) -> None:
    count = len(facts.tasks)
    after: list[list[int]] = [[] for _ in range(count)]
    waiting = [0] * count
    pairs = [(dep, task.index) for task in facts.tasks for dep in task.depends_on]
    for stream in facts.program.stream_views:
        pairs += zip(stream.tasks[:-1], stream.tasks[1:], strict=True)
    for before, later in pairs:
        after[before].append(later)
        waiting[later] += 1
    ready = [task for task in range(count) if not waiting[task]]
    done = 0
    while ready:
        task = ready.pop()
        done += 1
        for later in after[task]:
            waiting[later] -= 1
            if not waiting[later]:
                ready.append(later)
    if done < count:
        cycle = _find_cycle(after, {task for task in range(count) if waiting[task]})
        raise facts.fail("no cycle", " waits for ".join(facts.name(t) for t in cycle))
    for before, later in pairs:
        if before >= later:
            raise facts.fail(
                "order of issue",
                f"{facts.name(later)} must follow {facts.name(before)} but is numbered before it",
            )


def _find_cycle(after: list[list[int]], stuck: set[int]) -> list[int]:
    """A cycle among `stuck`, read backwards: each waits for the next."""
    before: dict[int, int] = {}
    for task in sorted(stuck):
        for later in after[task]:
            if later in stuck:
                before.setdefault(later, task)
    task, path = min(stuck), []
    while task in before and task not in path:
        path.append(task)
        task = before[task]
    return [*path[path.index(task) :], task] if task in path else [*path, task]


def _inputs_are_there(facts: _Facts) -> None:
    producer = facts.program.producers
    for task in facts.tasks:
        deps = set(task.depends_on)
        for value in task.reads:
            if producer[value] >= 0 and producer[value] not in deps:
                raise facts.fail(
                    "inputs in time",
                    f"{facts.name(task.index)} reads {facts.values[value].place()} without "
                    f"waiting for {facts.name(producer[value])}",
                )


def _each_block_computed_once(facts: _Facts) -> None:
    by: dict[int, int] = {}
    for task in facts.tasks:
        if isinstance(task, Compute):
            for block in task.tile:
                if block in by:
                    raise facts.fail(
                        "each block once",
                        f"block {block} is computed by {facts.name(by[block])} and "
                        f"{facts.name(task.index)}",
                    )
                by[block] = task.index
    for index, block in enumerate(facts.blocks):
        if index not in by:
            raise facts.fail(
                "each block once",
                f"block {index} (query chunk {block.q_chunk}, key chunk {block.kv_chunk}) is "
                "never computed",
            )


Region = tuple[int, int, int, int]
"""row_start, row_stop, head_start, head_stop."""


def _region(value: Value) -> Region:
    return value.row_start, value.row_stop, value.head_start, value.head_stop


def _area(region: Region) -> int:
    return max(0, region[1] - region[0]) * max(0, region[3] - region[2])


def _overlap(a: Region, b: Region) -> Region:
    return max(a[0], b[0]), min(a[1], b[1]), max(a[2], b[2]), min(a[3], b[3])


def _atoms(region: Region, pieces: Sequence[Region]) -> list[Region]:
    """Cuts `region` along the edges of all pieces; within an atom each piece is all or nothing."""
    if all(piece == region for piece in pieces):
        return [region]
    rows = sorted({region[0], region[1]} | {r for p in pieces for r in p[:2]})
    heads = sorted({region[2], region[3]} | {h for p in pieces for h in p[2:]})
    cells = [
        (a, b, c, d)
        for a, b in zip(rows[:-1], rows[1:], strict=True)
        for c, d in zip(heads[:-1], heads[1:], strict=True)
    ]
    return [cell for cell in cells if _area(_overlap(cell, region))]


def _covered(region: Region, pieces: Sequence[Region]) -> bool:
    """Whether pieces, overlapping or not, leave nothing of the region out."""
    if not _area(region) or any(_overlap(piece, region) == region for piece in pieces):
        return True
    return all(
        any(_area(_overlap(atom, piece)) for piece in pieces) for atom in _atoms(region, pieces)
    )


def _tile_inputs_complete(facts: _Facts) -> None:
    for task in facts.tasks:
        if not isinstance(task, Compute):
            continue
        have: dict[tuple[Tensor, int], list[Region]] = defaultdict(list)
        for number in task.reads:
            value = facts.values[number]
            have[value.tensor, value.chunk].append(_region(value))
        done = set()
        for block in task.tile:
            for tensor in facts.pass_.needs:
                chunk, heads = facts.rows_of(block, tensor), facts.heads(block, tensor)
                if (tensor, chunk, heads) in done:
                    continue
                done.add((tensor, chunk, heads))
                region = (0, len(facts.layout(tensor).chunks[chunk]), *heads)
                if not _covered(region, have[tensor, chunk]):
                    raise facts.fail(
                        "inputs of a tile",
                        f"{facts.name(task.index)} computes block {block} without all of {tensor} "
                        f"of chunk {chunk}, heads {heads[0]}:{heads[1]}",
                    )


def _relevant(facts: _Facts, cover: Iterable[int], tensor: Tensor, atom: Region) -> set[int]:
    """The blocks of a cover that reach the heads of an atom."""
    found = set()
    for block in cover:
        start, stop = facts.heads(block, tensor)
        if start < atom[3] and atom[2] < stop:
            found.add(block)
    return found


def _tile_outputs_complete(facts: _Facts) -> None:
    for task in facts.tasks:
        if not isinstance(task, Compute):
            continue
        outputs: dict[tuple[Tensor, int], list[Value]] = defaultdict(list)
        for number in task.writes:
            value = facts.values[number]
            if value.tensor not in facts.pass_.results:
                raise facts.fail("outputs of a tile", f"{facts.name(task.index)} writes {value}")
            outputs[value.tensor, value.chunk].append(value)
        lines: dict[tuple[Tensor, int], set[int]] = defaultdict(set)
        for block in task.tile:
            for tensor in facts.pass_.results:
                lines[tensor, facts.rows_of(block, tensor)].add(block)
        for key in sorted(outputs.keys() | lines.keys()):
            tensor, chunk = key
            rows = len(facts.layout(tensor).chunks[chunk])
            for head_atom in _head_atoms(facts, tensor, lines[key], outputs[key]):
                atom = (0, rows, *head_atom)
                expected = _relevant(facts, lines[key], tensor, atom)
                holders = [v for v in outputs[key] if _area(_overlap(_region(v), atom))]
                if not expected and not holders:
                    continue
                if rows == 0:
                    continue
                if (
                    len(holders) != 1
                    or _relevant(facts, holders[0].cover, tensor, atom) != expected
                    or (holders[0].row_start, holders[0].row_stop) != (0, rows)
                ):
                    raise facts.fail(
                        "outputs of a tile",
                        f"{facts.name(task.index)} must give {tensor} of chunk {chunk} heads "
                        f"{head_atom[0]}:{head_atom[1]} for blocks {sorted(expected)} exactly "
                        f"once; it gives {[sorted(h.cover) for h in holders]}",
                    )


def _head_atoms(
    facts: _Facts, tensor: Tensor, blocks: Iterable[int], values: Iterable[Value]
) -> list[tuple[int, int]]:
    cuts = {cut for block in blocks for cut in facts.heads(block, tensor)}
    cuts |= {cut for value in values for cut in (value.head_start, value.head_stop)}
    ordered = sorted(cuts)
    return list(zip(ordered[:-1], ordered[1:], strict=True))


def _merges_disjoint(facts: _Facts) -> None:
    for task in facts.tasks:
        scatter = isinstance(task, Collective) and task.op is CollectiveOp.REDUCE_SCATTER
        joins = isinstance(task, Local) and task.op in (LocalOp.GATHER, LocalOp.PACK, LocalOp.CAST)
        if isinstance(task, Merge) or scatter or joins:
            reads = [facts.values[number] for number in task.reads]
            for number in task.writes:
                _check_merge(facts, task, facts.values[number], reads, joins)


def _check_merge(
    facts: _Facts, task: Task, written: Value, reads: Sequence[Value], joins: bool
) -> None:
    same = [r for r in reads if r.tensor == written.tensor and r.chunk == written.chunk]
    parts = [r for r in same if _area(_overlap(_region(r), _region(written)))]
    if not parts and _area(_region(written)):
        raise facts.fail("merges", f"{facts.name(task.index)} makes {written.place()} of nothing")
    for atom in _atoms(_region(written), [_region(part) for part in parts]):
        here = [part for part in parts if _area(_overlap(_region(part), atom))]
        target = _relevant(facts, written.cover, written.tensor, atom)
        covers = [_relevant(facts, part.cover, written.tensor, atom) for part in here]
        union: set[int] = set().union(*covers)
        twice = sum(map(len, covers)) != len(union) or (joins and len(here) > 1)
        if twice or union != target or not here:
            raise facts.fail(
                "merges",
                f"{facts.name(task.index)} makes {written.place()} for blocks {sorted(target)} of "
                f"parts for {[sorted(cover) for cover in covers]}: a partial result must enter "
                "exactly once",
            )


def _partials_used_once(facts: _Facts) -> None:
    used: dict[int, int] = defaultdict(int)
    for task in facts.tasks:
        copies = isinstance(task, Transfer) or (
            isinstance(task, Collective) and task.op is not CollectiveOp.REDUCE_SCATTER
        )
        for number in task.reads:
            read = facts.values[number]
            if read.tensor not in facts.pass_.results:
                continue
            if copies:
                written = [facts.values[v] for v in task.writes]
                used[number] += sum(_area(_region(v)) for v in written if read.holds(v))
            else:
                used[number] += _area(_region(read))
    producer = facts.program.producers
    for index, value in enumerate(facts.values):
        if value.tensor not in facts.pass_.results or producer[index] < 0:
            continue
        area = _area(_region(value))
        expected = 0 if value.buffer < 0 else area
        if area and used[index] != expected:
            times = "more than once" if used[index] > expected else "not wholly"
            raise facts.fail(
                "partials once",
                f"{value.place()} for blocks {list(value.cover)} is used {times}",
            )


def _results_complete(facts: _Facts) -> None:
    producer = facts.program.producers
    found: dict[tuple[Tensor, int], list[Value]] = defaultdict(list)
    for index, value in enumerate(facts.values):
        if producer[index] >= 0 and value.buffer < 0:
            owner = facts.layout(value.tensor).owners[value.chunk]
            if value.tensor not in facts.pass_.results or value.rank != owner or value.wide:
                raise facts.fail("results", f"{value.place()} is no result of its rank")
            found[value.tensor, value.chunk].append(value)
    for tensor in facts.pass_.results:
        layout, heads = facts.layout(tensor), facts.problem.heads_of(tensor)
        for chunk, owner in enumerate(layout.owners):
            whole = (0, len(layout.chunks[chunk]), 0, heads)
            if not _area(whole):
                continue
            values = found[tensor, chunk]
            if sum(_area(_region(value)) for value in values) != _area(whole) or not _covered(
                whole, [_region(value) for value in values]
            ):
                raise facts.fail(
                    "results",
                    f"{tensor} of chunk {chunk} does not reach its owner, rank {owner}, whole and "
                    "once",
                )
            line = facts.line_blocks[tensor.by_key, chunk]
            for value in values:
                expected = _relevant(facts, line, tensor, _region(value))
                if set(value.cover) != expected:
                    raise facts.fail(
                        "results",
                        f"{value.place()} holds blocks {sorted(value.cover)}, expected "
                        f"{sorted(expected)}",
                    )


def _buffers_not_shared_in_time(facts: _Facts) -> None:
    producer, widths = facts.program.producers, facts.problem.widths
    sizes = facts.program.buffers.bytes.tolist()
    ranks = facts.program.buffers.rank.tolist()
    users: dict[int, list[int]] = defaultdict(list)
    for index, value in enumerate(facts.values):
        if value.buffer < 0:
            continue
        size = _area(_region(value)) * widths.row_bytes(value.tensor, value.wide)
        if not 0 <= value.buffer < len(sizes):
            raise facts.fail("buffers", f"{value.place()} is in buffer {value.buffer}, unknown")
        if size > sizes[value.buffer] or ranks[value.buffer] != value.rank or producer[index] < 0:
            raise facts.fail(
                "buffers",
                f"{value.place()} needs {size} bytes; buffer {value.buffer} has "
                f"{sizes[value.buffer]} on rank {ranks[value.buffer]}",
            )
        users[value.buffer].append(index)
    shared = {buffer: values for buffer, values in users.items() if len(values) > 1}
    if not shared:
        return
    readers: dict[int, list[int]] = defaultdict(list)
    for task in facts.tasks:
        for number in task.reads:
            readers[number].append(task.index)
    reach = _Reach(facts)
    for buffer, values in shared.items():
        ordered = sorted(values, key=lambda v: producer[v])
        for earlier, later in zip(ordered[:-1], ordered[1:], strict=True):
            for task in {producer[earlier], *readers[earlier]}:
                if not reach.before(task, producer[later]):
                    raise facts.fail(
                        "buffers",
                        f"{facts.name(producer[later])} reuses buffer {buffer} while "
                        f"{facts.name(task)} may still use {facts.values[earlier].place()}",
                    )


class _Reach:
    """Answers "does a finish before b starts?" along dependencies and streams."""

    def __init__(self, facts: _Facts) -> None:
        self._before: list[list[int]] = [list(task.depends_on) for task in facts.tasks]
        for stream in facts.program.stream_views:
            for earlier, later in zip(stream.tasks[:-1], stream.tasks[1:], strict=True):
                self._before[later].append(earlier)

    def before(self, a: int, b: int) -> bool:
        """Walks back from b, never past a: numbers only fall along the way."""
        stack, seen = [b], {b}
        while stack:
            for task in self._before[stack.pop()]:
                if task == a:
                    return True
                if task > a and task not in seen:
                    seen.add(task)
                    stack.append(task)
        return False
