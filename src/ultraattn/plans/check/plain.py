"""Sees from whole columns which rules a program plainly keeps, so that no task is looked at alone.

Each function here answers for one rule of this package: True only where the rule holds for every
task and value. Where it cannot tell at a glance (pieces of unlike extent, say) or where the rule is
broken, it answers False, and the rule itself looks task by task and names what is wrong. So what
is refused, and in which words, is the rules' business alone.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from ultraattn.chunks import Ints
from ultraattn.plans.builder import stream_pairs
from ultraattn.plans.check.derived import (
    COLLECTIVE,
    COMPUTE,
    DELTA,
    FILL,
    JOINS,
    LOCAL,
    MERGE,
    SCATTER,
    TRANSFER,
    Bools,
    Derived,
    items_of,
    lookup,
)
from ultraattn.plans.columns import Ragged
from ultraattn.plans.program import STREAM_ORDER
from ultraattn.plans.tensors import Tensor


class Plain(Derived):
    """One program, and for each rule whether it plainly keeps it."""

    def values_have_one_source(self) -> bool:
        """See the rule."""
        v = self.values
        writers = np.bincount(self.tasks.writes.items, minlength=len(self.by_key))
        given = writers == 0
        there = (v.rank == self.owner) | (self.facts.kept >= 0)
        fine = self.among(self.facts.pass_.inputs) & there & (v.wide == 0)
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
        target = lookup(
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
        return not same.any() and self.same_cover(members[0], members[1])

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
        if not self.apart(value, self.line[value], task):
            return False
        block = items_of(self.values.cover, value)
        of = np.repeat(task, np.diff(self.values.cover.offsets)[value])
        return (
            np.array_equal(self.task_of_block[block], of)
            and self._each_once(value, tasks.tile.items)
            and self.covers_fit(value)
        )

    def _each_once(self, values: Ints, blocks: Ints) -> bool:
        """Whether, for every result tensor, covers name these blocks once each and no other."""
        expected = np.bincount(blocks, minlength=len(self.blocks.kind))
        for tensor in self.facts.pass_.results:
            mine = values[self.values.tensor[values] == tensor.code]
            named = items_of(self.values.cover, mine)
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
        if len(np.unique(write)) < len(write) or not self.covers_fit(read):
            return False
        blocks = len(self.blocks.kind)
        made = np.repeat(target, np.diff(cover.offsets)[read]) * blocks + items_of(cover, read)
        wanted = np.repeat(write, np.diff(cover.offsets)[write]) * blocks + items_of(cover, write)
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
        if not self.apart(write, self.line[write], w_task):
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
        return self._each_once(value, every) and self.covers_fit(value)

    def buffers_not_shared_in_time(self) -> bool:
        """See the rule."""
        buffers, v = self.facts.program.buffers, self.values
        kept = np.flatnonzero(v.buffer >= 0)
        buffer = v.buffer[kept]
        size = self.area[kept] * self.facts.problem.widths.table[v.tensor[kept], v.wide[kept]]
        fine = (size <= buffers.bytes[buffer]) & (buffers.rank[buffer] == v.rank[kept])
        fine &= self.producer[kept] >= 0
        return bool(fine.all()) and len(np.unique(buffer)) == len(buffer)
