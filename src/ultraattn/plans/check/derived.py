"""Derives columns from those of a program: what the rules of a check ask of many tasks at once."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt

from ultraattn.chunks import Ints
from ultraattn.plans.check.facts import Facts
from ultraattn.plans.columns import Ragged
from ultraattn.plans.program import (
    COLLECTIVE_ORDER,
    LOCAL_ORDER,
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


class Derived:
    """One program; its numbers are known to be in range (`numbers_in_range`)."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        program = facts.program
        self.values, self.tasks, self.blocks = program.values, program.tasks, program.blocks
        self.count = len(self.tasks.kind)

    @cached_property
    def by_key(self) -> Bools:
        """Whether a value's rows are keys."""
        keys: Bools = BY_KEY[self.values.tensor]
        return keys

    @cached_property
    def result(self) -> Bools:
        """Whether a value is of a tensor that the pass gives back."""
        return self.among(self.facts.pass_.results)

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

    def among(self, tensors: tuple[Tensor, ...]) -> Bools:
        """Whether a value is of one of these tensors."""
        return np.isin(self.values.tensor, [tensor.code for tensor in tensors])

    def same_cover(self, a: Ints, b: Ints) -> bool:
        """Whether values ``a[i]`` and ``b[i]`` cover the same blocks, for all i."""
        cover = self.values.cover
        length = np.diff(cover.offsets)
        if not np.array_equal(length[a], length[b]):
            return False
        return np.array_equal(items_of(cover, a), items_of(cover, b))

    @cached_property
    def span(self) -> tuple[tuple[Ints, Ints], tuple[Ints, Ints]]:
        """First and last heads of each block: query heads, and key/value heads."""
        a, b, group = self.blocks.head_start, self.blocks.head_stop, self.facts.problem.group
        return (a, b), (a // group, -(-b // group))

    def covers_fit(self, which: Ints) -> bool:
        """Whether every block of some values' covers lies in the value's chunk and heads."""
        cover, v = self.values.cover, self.values
        value = np.repeat(which, np.diff(cover.offsets)[which])
        block, keys = items_of(cover, which), self.by_key[value]
        chunk = np.where(keys, self.blocks.kv_chunk[block], self.blocks.q_chunk[block])
        (qa, qb), (ka, kb) = self.span
        start, stop = np.where(keys, ka[block], qa[block]), np.where(keys, kb[block], qb[block])
        fit = (chunk == v.chunk[value]) & (v.head_start[value] <= start)
        return bool((fit & (stop <= v.head_stop[value])).all())

    def apart(self, which: Ints, *groups: Ints) -> bool:
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
        source = lookup(r_task * wide + self.line[read], read, w_task * wide + self.line[write])
        unsure = np.flatnonzero(source < 0)
        if len(unsure):
            # Several pieces of one chunk: told apart by their blocks and extents.
            if not self.apart(read, self.first_block[read], self.line[read], r_task):
                return None
            wide = int(self.extent.max(initial=0)) + 1
            blocks = len(self.blocks.kind) + 1
            keys = [
                (task * wide + self.extent[value]) * blocks + self.first_block[value] + 1
                for task, value in ((r_task, read), (w_task[unsure], write[unsure]))
            ]
            source[unsure] = lookup(keys[0], read, keys[1])
        if (source < 0).any():
            return None
        held = (
            (v.wide[source] == v.wide[write])
            & (v.row_start[source] <= v.row_start[write])
            & (v.row_stop[write] <= v.row_stop[source])
            & (v.head_start[source] <= v.head_start[write])
            & (v.head_stop[write] <= v.head_stop[source])
        )
        if not held.all() or not self.same_cover(source, write):
            return None
        # Each piece read goes to somebody.
        number = len(self.by_key)
        used = np.unique(w_task * number + source)
        return (write, source) if len(used) == len(np.unique(r_task * number + read)) else None


def items_of(ragged: Ragged, rows: Ints) -> Ints:
    """The items of some rows, one row after another."""
    length = np.diff(ragged.offsets)[rows]
    first = np.repeat(ragged.offsets[:-1][rows] - (np.cumsum(length) - length), length)
    items: Ints = ragged.items[first + np.arange(int(length.sum()))]
    return items


def lookup(keys: Ints, values: Ints, wanted: Ints) -> Ints:
    """The value of each wanted key; -1 where no key is like it, or more than one."""
    order = np.argsort(keys, kind="stable")
    keys, values = keys[order], values[order]
    begin = np.searchsorted(keys, wanted)
    one = np.searchsorted(keys, wanted, side="right") - begin == 1
    if not len(keys):
        return np.full(len(wanted), -1, dtype=np.int64)
    out: Ints = np.where(one, values[np.minimum(begin, len(keys) - 1)], -1)
    return out
