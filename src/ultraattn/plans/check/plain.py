"""Sees from whole columns which rules a program plainly keeps, so that no task is looked at alone.

Each function here answers for one rule of this package: True only where the rule holds for every
task and value. Where it cannot tell at a glance (pieces of unlike extent, say) or where the rule is
broken, it answers False, and the rule itself looks task by task and names what is wrong. So what
is refused, and in which words, is the rules' business alone.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt

from ultraattn.chunks import Ints
from ultraattn.plans.builder import stream_pairs
from ultraattn.plans.check.facts import Facts
from ultraattn.plans.columns import Ragged
from ultraattn.plans.program import (
    COLLECTIVE_ORDER,
    LOCAL_ORDER,
    STREAM_ORDER,
    TASK_ORDER,
    CollectiveOp,
    LocalOp,
    TaskKind,
)
from ultraattn.plans.tensors import TENSOR_ORDER, Tensor

Bools = npt.NDArray[np.bool_]
COMPUTE, TRANSFER, COLLECTIVE, MERGE, LOCAL = (
    TASK_ORDER.index(kind)
    for kind in (
        TaskKind.COMPUTE,
        TaskKind.TRANSFER,
        TaskKind.COLLECTIVE,
        TaskKind.MERGE,
        TaskKind.LOCAL,
    )
)
SCATTER = COLLECTIVE_ORDER.index(CollectiveOp.REDUCE_SCATTER)
FILL, DELTA = LOCAL_ORDER.index(LocalOp.FILL), LOCAL_ORDER.index(LocalOp.DELTA)
JOINS = [LOCAL_ORDER.index(op) for op in (LocalOp.GATHER, LocalOp.PACK, LocalOp.CAST)]
BY_KEY = np.array([tensor.by_key for tensor in TENSOR_ORDER])


class Plain:
    """One program; its numbers are known to be in range (`numbers_in_range`)."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        program = facts.program
        self.values, self.tasks, self.blocks = program.values, program.tasks, program.blocks
        self.count = len(self.tasks.kind)

    # Columns

    @cached_property
    def by_key(self) -> Bools:
        """Whether a value's rows are keys."""
        keys: Bools = BY_KEY[self.values.tensor]
        return keys

    @cached_property
    def result(self) -> Bools:
        """Whether a value is of a tensor that the pass gives back."""
        return self._among(self.facts.pass_.results)

    @cached_property
    def rows(self) -> Ints:
        """Rows of the whole chunk of each value."""
        q, kv = (x.chunks.sizes() for x in (self.facts.q_layout, self.facts.kv_layout))
        out = np.zeros(len(self.by_key), dtype=np.int64)
        out[self.by_key] = kv[self.values.chunk[self.by_key]]
        out[~self.by_key] = q[self.values.chunk[~self.by_key]]
        return out

    @cached_property
    def owner(self) -> Ints:
        """The rank that owns each value's chunk."""
        q, kv = (np.array(x.owners) for x in (self.facts.q_layout, self.facts.kv_layout))
        out = np.zeros(len(self.by_key), dtype=np.int64)
        out[self.by_key] = kv[self.values.chunk[self.by_key]]
        out[~self.by_key] = q[self.values.chunk[~self.by_key]]
        return out

    @cached_property
    def whole_rows(self) -> Bools:
        """Whether a value holds all rows of its chunk."""
        v = self.values
        whole: Bools = (v.row_start == 0) & (v.row_stop == self.rows)
        return whole

    @cached_property
    def area(self) -> Ints:
        """Rows times heads of each value."""
        v = self.values
        area: Ints = (v.row_stop - v.row_start) * (v.head_stop - v.head_start)
        return area

    @cached_property
    def producer(self) -> Ints:
        """For each value, the first task that writes it, or -1."""
        return self.facts.program.producer

    @cached_property
    def first_block(self) -> Ints:
        """The first block of each value's cover; -1 where it has none."""
        cover = self.values.cover
        out = np.full(len(cover), -1, dtype=np.int64)
        some = np.diff(cover.offsets) > 0
        out[some] = cover.items[cover.offsets[:-1][some]]
        return out

    @cached_property
    def line(self) -> Ints:
        """A number for each (tensor, chunk)."""
        q, kv = len(self.facts.q_layout.chunks), len(self.facts.kv_layout.chunks)
        line: Ints = self.values.tensor * max(q, kv, 1) + self.values.chunk
        return line

    @cached_property
    def extent(self) -> Ints:
        """A number for each (tensor, chunk, rows, heads)."""
        v = self.values
        known = self.line
        for part in (v.row_start, v.row_stop, v.head_start, v.head_stop):
            known = np.unique(known * (int(part.max(initial=0)) + 1) + part, return_inverse=True)[1]
            known = known.astype(np.int64)
        return known

    def _among(self, tensors: tuple[Tensor, ...]) -> Bools:
        return np.isin(self.values.tensor, [tensor.code for tensor in tensors])

    def _same_cover(self, a: Ints, b: Ints) -> bool:
        """Whether values ``a[i]`` and ``b[i]`` cover the same blocks, for all i."""
        cover = self.values.cover
        length = np.diff(cover.offsets)
        if not np.array_equal(length[a], length[b]):
            return False
        return np.array_equal(_items(cover, a), _items(cover, b))

    @cached_property
    def span(self) -> tuple[tuple[Ints, Ints], tuple[Ints, Ints]]:
        """First and last heads of each block: query heads, and key/value heads."""
        a, b, group = self.blocks.head_start, self.blocks.head_stop, self.facts.problem.group
        return (a, b), (a // group, -(-b // group))

    def _covers_fit(self, which: Ints) -> bool:
        """Whether every block of some values' covers lies in the value's chunk and heads."""
        cover, v = self.values.cover, self.values
        value = np.repeat(which, np.diff(cover.offsets)[which])
        block, keys = _items(cover, which), self.by_key[value]
        chunk = np.where(keys, self.blocks.kv_chunk[block], self.blocks.q_chunk[block])
        (qa, qb), (ka, kb) = self.span
        start, stop = np.where(keys, ka[block], qa[block]), np.where(keys, kb[block], qb[block])
        fit = (chunk == v.chunk[value]) & (v.head_start[value] <= start)
        return bool((fit & (stop <= v.head_stop[value])).all())

    def _apart(self, which: Ints, *groups: Ints) -> bool:
        """Whether the heads of some values are disjoint within each group."""
        start, stop = self.values.head_start[which], self.values.head_stop[which]
        order = np.lexsort((start, *groups))
        meet = start[order][1:] < stop[order][:-1]
        for group in groups:
            meet &= group[order][1:] == group[order][:-1]
        return not meet.any()

    # Sources of copies

    @cached_property
    def copies(self) -> Bools:
        """Whether a task delivers copies."""
        tasks = self.tasks
        gathers = (tasks.kind == COLLECTIVE) & (tasks.op != SCATTER)
        found: Bools = (tasks.kind == TRANSFER) | gathers
        return found

    @cached_property
    def sources(self) -> tuple[Ints, Ints] | None:
        """Values written by copies, and the one value read that holds each; None if unsure."""
        tasks, v = self.tasks, self.values
        reading, writing = self.copies[tasks.reads.row_of], self.copies[tasks.writes.row_of]
        read, r_task = tasks.reads.items[reading], tasks.reads.row_of[reading]
        write, w_task = tasks.writes.items[writing], tasks.writes.row_of[writing]
        if not len(write):
            return (write, write) if not len(read) else None
        if not len(read):
            return None
        wide = int(self.line.max(initial=0)) + 1
        source = _lookup(r_task * wide + self.line[read], read, w_task * wide + self.line[write])
        unsure = np.flatnonzero(source < 0)
        if len(unsure):
            # Several pieces of one chunk: told apart by their blocks and extents.
            if not self._apart(read, self.first_block[read], self.line[read], r_task):
                return None
            wide = int(self.extent.max(initial=0)) + 1
            blocks = len(self.blocks.kind) + 1
            keys = [
                (task * wide + self.extent[value]) * blocks + self.first_block[value] + 1
                for task, value in ((r_task, read), (w_task[unsure], write[unsure]))
            ]
            source[unsure] = _lookup(keys[0], read, keys[1])
        if (source < 0).any():
            return None
        held = (
            (v.wide[source] == v.wide[write])
            & (v.row_start[source] <= v.row_start[write])
            & (v.row_stop[write] <= v.row_stop[source])
            & (v.head_start[source] <= v.head_start[write])
            & (v.head_stop[write] <= v.head_stop[source])
        )
        if not held.all() or not self._same_cover(source, write):
            return None
        # Each piece read goes to somebody.
        number = len(self.by_key)
        used = np.unique(w_task * number + source)
        return (write, source) if len(used) == len(np.unique(r_task * number + read)) else None

    # Rules

    def values_have_one_source(self) -> bool:
        """See the rule."""
        v = self.values
        writers = np.bincount(self.tasks.writes.items, minlength=len(self.by_key))
        given = writers == 0
        fine = self._among(self.facts.pass_.inputs) & (v.rank == self.owner) & (v.wide == 0)
        fine &= np.diff(v.cover.offsets) == 0
        return bool((writers <= 1).all() and fine[given].all())

    def places(self) -> bool:
        """See the rule."""
        tasks, rank = self.tasks, self.values.rank
        if (tasks.kind == COLLECTIVE).any() and not self._members():
            return False
        for ragged, other in ((tasks.reads, False), (tasks.writes, True)):
            at = tasks.rank[ragged.row_of]
            kind = tasks.kind[ragged.row_of]
            alike = rank[ragged.items] == at
            fine = np.where(other & (kind == TRANSFER), ~alike, alike) | (kind == COLLECTIVE)
            if not fine.all():
                return False
        return self.sources is not None and self._scatters()

    def _members(self) -> bool:
        """Whether collectives stand at their lowest member."""
        tasks, rank = self.tasks, self.values.rank
        lowest = np.full(self.count, np.iinfo(np.int64).max)
        for ragged in (tasks.reads, tasks.writes):
            np.minimum.at(lowest, ragged.row_of, rank[ragged.items])
        return bool((lowest == tasks.rank)[tasks.kind == COLLECTIVE].all())

    def _scatters(self) -> bool:
        """Whether reduce-scatters bring each part to the one target of its extent."""
        tasks = self.tasks
        scatters = (tasks.kind == COLLECTIVE) & (tasks.op == SCATTER)
        return self._targets(scatters) is not None

    def _targets(self, these: Bools) -> tuple[Ints, Ints, Ints, Ints] | None:
        """Of some tasks: task and value written; task and target of each value read, or None.

        None where a target's extent is there twice, or a part has the extent of none.
        """
        tasks = self.tasks
        reading, writing = these[tasks.reads.row_of], these[tasks.writes.row_of]
        read, r_task = tasks.reads.items[reading], tasks.reads.row_of[reading]
        write, w_task = tasks.writes.items[writing], tasks.writes.row_of[writing]
        wide = int(self.extent.max(initial=0)) + 1
        target = _lookup(
            w_task * wide + self.extent[write], write, r_task * wide + self.extent[read]
        )
        if (target < 0).any() or len(np.unique(w_task * wide + self.extent[write])) < len(write):
            return None
        return w_task, write, read, target

    def work_fits_values(self) -> bool:
        """See the rule."""
        tasks, v = self.tasks, self.values
        kind, op = tasks.kind[tasks.writes.row_of], tasks.op[tasks.writes.row_of]
        written, count = tasks.writes.items, np.diff(tasks.reads.offsets)
        fills = (kind == LOCAL) & (op == FILL)
        merges = (kind == MERGE) | ((kind == COLLECTIVE) & (op == SCATTER))
        wrong = (merges | fills) & ~self.result[written]
        covered = np.diff(v.cover.offsets)[written] > 0
        wrong |= fills & (covered | (count[tasks.writes.row_of] > 0))
        wrong |= (kind == LOCAL) & (op == DELTA) & (v.tensor[written] != Tensor.DELTA.code)
        if wrong.any():
            return False
        merging = (tasks.kind == MERGE) | ((tasks.kind == COLLECTIVE) & (tasks.op == SCATTER))
        makes = merging | (tasks.kind == COMPUTE)
        return self._o_with_lse(tasks.writes, makes) and self._o_with_lse(tasks.reads, merging)

    def _o_with_lse(self, ragged: Ragged, these: Bools) -> bool:
        """Whether each O of some tasks has one LSE like it."""
        there, v = these[ragged.row_of], self.values
        item, task = ragged.items[there], ragged.row_of[there]
        kept: list[tuple[Ints, ...]] = []
        members: list[Ints] = []
        for tensor in (Tensor.O, Tensor.LSE):
            mine = v.tensor[item] == tensor.code
            value, at = item[mine], task[mine]
            columns = (
                self.first_block[value], v.rank[value], v.head_stop[value], v.head_start[value],
                v.row_stop[value], v.row_start[value], v.chunk[value], at,
            )  # fmt: skip
            order = np.lexsort(columns)
            kept.append(tuple(column[order] for column in columns))
            members.append(value[order])
        if len(members[0]) != len(members[1]):
            return False
        if not all(np.array_equal(a, b) for a, b in zip(*kept, strict=True)):
            return False
        same = np.ones(max(0, len(members[0]) - 1), dtype=np.bool_)
        for column in kept[0]:
            same &= column[1:] == column[:-1]
        return not same.any() and self._same_cover(members[0], members[1])

    def streams_hold_each_task(self) -> bool:
        """See the rule."""
        streams, tasks = self.facts.program.streams, self.tasks
        code = streams.rank * len(STREAM_ORDER) + streams.kind
        if len(np.unique(code)) < len(code):
            return False
        have = code[streams.tasks.row_of] * max(1, self.count) + streams.tasks.items
        expected = stream_pairs(
            tasks.kind, tasks.rank, tasks.reads, tasks.writes, self.values.rank, self.facts.nodes
        )
        return np.array_equal(np.sort(have), expected)

    @cached_property
    def ascend(self) -> bool:
        """Whether every stream's tasks ascend."""
        streams = self.facts.program.streams.tasks
        follow = streams.row_of[1:] == streams.row_of[:-1]
        return bool((np.diff(streams.items)[follow] > 0).all())

    def same_order_on_both_ranks(self) -> bool:
        """See the rule: streams that hold each task once and ascend have one order."""
        return self.ascend and self.streams_hold_each_task()

    def no_cycle(self) -> bool:
        """See the rule."""
        deps = self.tasks.depends_on
        return self.ascend and bool((deps.items < deps.row_of).all())

    def inputs_are_there(self) -> bool:
        """See the rule."""
        reads, deps = self.tasks.reads, self.tasks.depends_on
        before = self.producer[reads.items]
        made = before >= 0
        needed = np.unique(reads.row_of[made] * self.count + before[made])
        return bool(np.isin(needed, deps.row_of * self.count + deps.items).all())

    def each_block_computed_once(self) -> bool:
        """See the rule: only launches have tiles (`numbers_in_range`)."""
        times = np.bincount(self.tasks.tile.items, minlength=len(self.blocks.kind))
        return bool((times == 1).all())

    @cached_property
    def task_of_block(self) -> Ints:
        """The launch of each block."""
        out = np.full(len(self.blocks.kind), -1, dtype=np.int64)
        out[self.tasks.tile.items] = self.tasks.tile.row_of
        return out

    def inputs_complete(self) -> bool:
        """See the rule: each block's rows and heads of each tensor in one value, for a glance."""
        tile, needs = self.tasks.tile, self.facts.pass_.needs
        for tensor in needs:
            chunk = self.blocks.kv_chunk if tensor.by_key else self.blocks.q_chunk
            first, last = self.span[tensor.by_key]
            block = tile.items
            if not self._held(tensor, tile.row_of, chunk[block], first[block], last[block]):
                return False
        return self._deltas()

    def _held(self, tensor: Tensor, task: Ints, chunk: Ints, first: Ints, last: Ints) -> bool:
        """Whether each task reads one value with all rows of a chunk, heads first to last."""
        reads, v = self.tasks.reads, self.values
        chunks = max(len(self.facts.q_layout.chunks), len(self.facts.kv_layout.chunks), 1)
        heads = self.facts.problem.heads + 1
        key = np.unique(((task * chunks + chunk) * heads + first) * heads + last)
        key, last = key // heads, key % heads
        key, first = key // heads, key % heads
        mine = (v.tensor[reads.items] == tensor.code) & self.whole_rows[reads.items]
        value = reads.items[mine]
        have = reads.row_of[mine] * chunks + v.chunk[value]
        order = np.argsort(have, kind="stable")
        have, value = have[order], value[order]
        begin, end = np.searchsorted(have, key), np.searchsorted(have, key, side="right")
        count = end - begin
        if not count.all():
            return False
        which = np.repeat(np.arange(len(key)), count)
        at = value[
            np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count) + begin[which]
        ]
        held = (v.head_start[at] <= first[which]) & (last[which] <= v.head_stop[at])
        return bool((np.bincount(which[held], minlength=len(key)) > 0).all())

    def _deltas(self) -> bool:
        tasks, v = self.tasks, self.values
        makes = (tasks.kind == LOCAL) & (tasks.op == DELTA)
        mine = makes[tasks.writes.row_of]
        value, task = tasks.writes.items[mine], tasks.writes.row_of[mine]
        if not len(value):
            return True
        columns = task, v.chunk[value], v.head_start[value], v.head_stop[value]
        return bool(self.whole_rows[value].all()) and all(
            self._held(tensor, *columns) for tensor in (Tensor.DO, Tensor.O)
        )

    def tile_outputs_complete(self) -> bool:
        """See the rule: results of disjoint heads, each block in one of them."""
        tasks = self.tasks
        computes = tasks.kind == COMPUTE
        if not np.diff(tasks.tile.offsets)[computes].all():
            return False
        mine = computes[tasks.writes.row_of]
        value, task = tasks.writes.items[mine], tasks.writes.row_of[mine]
        if not (self.result[value] & self.whole_rows[value] & (self.first_block[value] >= 0)).all():
            return False
        if not self._apart(value, self.line[value], task):
            return False
        block = _items(self.values.cover, value)
        of = np.repeat(task, np.diff(self.values.cover.offsets)[value])
        return (
            np.array_equal(self.task_of_block[block], of)
            and self._each_once(value, tasks.tile.items)
            and self._covers_fit(value)
        )

    def _each_once(self, values: Ints, blocks: Ints) -> bool:
        """Whether, for every result tensor, covers name these blocks once each and no other."""
        expected = np.bincount(blocks, minlength=len(self.blocks.kind))
        for tensor in self.facts.pass_.results:
            mine = values[self.values.tensor[values] == tensor.code]
            named = _items(self.values.cover, mine)
            if not np.array_equal(np.bincount(named, minlength=len(expected)), expected):
                return False
        return True

    def merges_disjoint(self) -> bool:
        """See the rule: parts of their result's extent, whose covers add up to its cover."""
        tasks, cover = self.tasks, self.values.cover
        if np.isin(tasks.op[tasks.kind == LOCAL], JOINS).any():
            return False
        scatters = (tasks.kind == COLLECTIVE) & (tasks.op == SCATTER)
        found = self._results((tasks.kind == MERGE) | scatters)
        if found is None:
            return False
        write, read, target = found
        if len(np.unique(write)) < len(write) or not self._covers_fit(read):
            return False
        blocks = len(self.blocks.kind)
        made = np.repeat(target, np.diff(cover.offsets)[read]) * blocks + _items(cover, read)
        wanted = np.repeat(write, np.diff(cover.offsets)[write]) * blocks + _items(cover, write)
        return np.array_equal(np.sort(made), np.sort(wanted))

    def _results(self, these: Bools) -> tuple[Ints, Ints, Ints] | None:
        """Of some tasks: values written, values read, and of each of these its result, or None.

        None unless each value read has the rows of one result and lies within its heads, results
        of a task are disjoint, and no head of a result is left out.
        """
        tasks, v = self.tasks, self.values
        reading, writing = these[tasks.reads.row_of], these[tasks.writes.row_of]
        read, r_task = tasks.reads.items[reading], tasks.reads.row_of[reading]
        write, w_task = tasks.writes.items[writing], tasks.writes.row_of[writing]
        if not len(write):
            return None if len(read) else (write, read, read)
        if not self._apart(write, self.line[write], w_task):
            return None
        lines, heads = int(self.line.max()) + 1, self.facts.problem.heads + 1
        place = (w_task * lines + self.line[write]) * heads + v.head_start[write]
        order = np.argsort(place, kind="stable")
        write, place = write[order], place[order]
        group, begin = r_task * lines + self.line[read], v.head_start[read]
        at = np.searchsorted(place, group * heads + begin, side="right") - 1
        if (at < 0).any():
            return None
        target = write[at]
        within = (place[at] // heads == group) & (v.head_stop[read] <= v.head_stop[target])
        within &= v.row_start[read] == v.row_start[target]
        within &= v.row_stop[read] == v.row_stop[target]
        if not within.all() or len(np.unique(at)) < len(write):
            return None
        # Parts by result and first head: how far the result is filled before each.
        order = np.lexsort((begin, at))
        at, start, stop = at[order], begin[order], v.head_stop[read][order]
        filled = np.maximum.accumulate(at * heads + stop)
        first = np.concatenate(([True], at[1:] != at[:-1]))
        follows = first[1:] | ((at * heads + start)[1:] <= filled[:-1])
        begun = start[first] == v.head_start[write]
        ended = filled[np.roll(first, -1)] - np.arange(len(write)) * heads == v.head_stop[write]
        return (write, read, target) if (begun & ended).all() and follows.all() else None

    def partials_used_once(self) -> bool:
        """See the rule."""
        if self.sources is None:
            return False
        reads, count = self.tasks.reads, len(self.by_key)
        direct = reads.items[~self.copies[reads.row_of]]
        used = np.bincount(direct, minlength=count) * self.area
        write, source = self.sources
        np.add.at(used, source, self.area[write])
        expected = np.where(self.values.buffer < 0, 0, self.area)
        mine = self.result & (self.producer >= 0) & (self.area > 0)
        return np.array_equal(used[mine], expected[mine])

    def results_complete(self) -> bool:
        """See the rule: results side by side, each block of the line in one of them."""
        v = self.values
        value = np.flatnonzero((self.producer >= 0) & (v.buffer < 0))
        fine = self.result & (v.rank == self.owner) & (v.wide == 0) & self.whole_rows
        if not fine[value].all():
            return False
        order = np.lexsort((v.head_start[value], self.line[value]))
        value = value[order]
        line, start, stop = self.line[value], v.head_start[value], v.head_stop[value]
        first = np.concatenate(([True], line[1:] != line[:-1])) if len(line) else line == 0
        last = np.roll(first, -1)
        heads = np.where(self.by_key, self.facts.problem.kv_heads, self.facts.problem.heads)
        follows = first[1:] | (start[1:] == stop[:-1])
        if not ((start[first] == 0).all() and follows.all()):
            return False
        if not (stop == heads[value])[last].all():
            return False
        for tensor in self.facts.pass_.results:
            layout = self.facts.layout(tensor)
            filled = np.flatnonzero(layout.chunks.sizes() > 0)
            if not np.isin(filled, v.chunk[value][v.tensor[value] == tensor.code]).all():
                return False
        every = np.arange(len(self.blocks.kind))
        return self._each_once(value, every) and self._covers_fit(value)

    def buffers_not_shared_in_time(self) -> bool:
        """See the rule."""
        buffers, v = self.facts.program.buffers, self.values
        kept = np.flatnonzero(v.buffer >= 0)
        buffer = v.buffer[kept]
        size = self.area[kept] * self.facts.problem.widths.table[v.tensor[kept], v.wide[kept]]
        fine = (size <= buffers.bytes[buffer]) & (buffers.rank[buffer] == v.rank[kept])
        fine &= self.producer[kept] >= 0
        return bool(fine.all()) and len(np.unique(buffer)) == len(buffer)


def _items(ragged: Ragged, rows: Ints) -> Ints:
    """The items of some rows, one row after another."""
    length = np.diff(ragged.offsets)[rows]
    first = np.repeat(ragged.offsets[:-1][rows] - (np.cumsum(length) - length), length)
    items: Ints = ragged.items[first + np.arange(int(length.sum()))]
    return items


def _lookup(keys: Ints, values: Ints, wanted: Ints) -> Ints:
    """The value of each wanted key; -1 where no key is like it, or more than one."""
    order = np.argsort(keys, kind="stable")
    keys, values = keys[order], values[order]
    begin = np.searchsorted(keys, wanted)
    one = np.searchsorted(keys, wanted, side="right") - begin == 1
    if not len(keys):
        return np.full(len(wanted), -1, dtype=np.int64)
    out: Ints = np.where(one, values[np.minimum(begin, len(keys) - 1)], -1)
    return out
