"""Checks that every number of a program names something, and that the blocks add up to the mask."""

from __future__ import annotations

import dataclasses

import numpy as np

from ultraattn.chunks import Ints
from ultraattn.masks.grid import KIND_ORDER, OPEN_HI, OPEN_LO, BlockKind, band_pairs
from ultraattn.plans.check.facts import Facts
from ultraattn.plans.columns import Ragged
from ultraattn.plans.program import (
    COLLECTIVE_ORDER,
    LOCAL_ORDER,
    STREAM_ORDER,
    TASK_ORDER,
    TaskKind,
)
from ultraattn.plans.tensors import TENSOR_ORDER

RULE = "numbers in range"


def numbers_in_range(facts: Facts) -> None:
    """Every column has one length with its table, and every number names something that exists."""
    _tables(facts)
    _lengths(facts)
    program, ranks = facts.program, facts.q_layout.ranks
    blocks, values, tasks = program.blocks, program.values, program.tasks
    limits: dict[str, tuple[Ints, int, int]] = {
        "kind of a task": (tasks.kind, 0, len(TASK_ORDER)),
        "rank of a task": (tasks.rank, 0, ranks),
        "value read": (tasks.reads.items, 0, len(values.rank)),
        "value written": (tasks.writes.items, 0, len(values.rank)),
        "dependency": (tasks.depends_on.items, 0, len(tasks.rank)),
        "block of a tile": (tasks.tile.items, 0, len(blocks.kind)),
        "tensor of a value": (values.tensor, 0, len(TENSOR_ORDER)),
        "rank of a value": (values.rank, 0, ranks),
        "wide of a value": (values.wide, 0, 2),
        "buffer of a value": (values.buffer, -1, len(program.buffers.rank)),
        "block of a cover": (values.cover.items, 0, len(blocks.kind)),
        "kind of a stream": (program.streams.kind, 0, len(STREAM_ORDER)),
        "rank of a stream": (program.streams.rank, 0, ranks),
        "task of a stream": (program.streams.tasks.items, 0, len(tasks.rank)),
        "rank of a buffer": (program.buffers.rank, 0, ranks),
        "bytes of a buffer": (program.buffers.bytes, 0, 2**62),
        "kind of a block": (blocks.kind, 0, len(KIND_ORDER)),
        "query chunk of a block": (blocks.q_chunk, 0, len(facts.q_layout.chunks)),
        "key chunk of a block": (blocks.kv_chunk, 0, len(facts.kv_layout.chunks)),
        "first head of a block": (blocks.head_start, 0, facts.problem.heads),
        "last head of a block": (blocks.head_stop, 1, facts.problem.heads + 1),
        "lower limit of a block": (blocks.lo, OPEN_LO, OPEN_HI + 1),
        "upper limit of a block": (blocks.hi, OPEN_LO, OPEN_HI + 1),
    }
    for what, (items, least, limit) in limits.items():
        wrong = np.flatnonzero((items < least) | (items >= limit))
        if wrong.size:
            raise facts.fail(
                RULE, f"{what} is {int(items[wrong[0]])}, expected {least} to {limit - 1}"
            )
    _ops(facts)
    _covers_ascend(facts)
    _extents(facts)


def _extents(facts: Facts) -> None:
    """Rows and heads of values lie within their chunks."""
    v = facts.program.values
    keys = np.array([tensor.by_key for tensor in TENSOR_ORDER])[v.tensor]
    sizes = [layout.chunks.sizes() for layout in (facts.q_layout, facts.kv_layout)]
    known = (v.chunk >= 0) & (v.chunk < np.where(keys, len(sizes[1]), len(sizes[0])))
    for index in np.flatnonzero(~known).tolist():
        raise facts.fail(RULE, f"value {index} names chunk {int(v.chunk[index])}")
    rows = np.zeros(len(keys), dtype=np.int64)
    for by_key, size in enumerate(sizes):
        mine = keys == bool(by_key)
        rows[mine] = size[v.chunk[mine]]
    heads = np.where(keys, facts.problem.kv_heads, facts.problem.heads)
    wrong = (v.row_start < 0) | (v.row_start > v.row_stop) | (v.row_stop > rows)
    wrong |= (v.head_start < 0) | (v.head_start >= v.head_stop) | (v.head_stop > heads)
    for index in np.flatnonzero(wrong).tolist():
        raise facts.fail(
            RULE,
            f"value {index}, {facts.values[index].place()}, of {int(rows[index])} rows, "
            f"{int(heads[index])} heads",
        )


def _tables(facts: Facts) -> None:
    program = facts.program
    for table in dataclasses.fields(program):
        columns = getattr(program, table.name)
        lengths = {f.name: len(getattr(columns, f.name)) for f in dataclasses.fields(columns)}
        if len(set(lengths.values())) > 1:
            raise facts.fail(RULE, f"the columns of {table.name} have lengths {lengths}")
        for field in dataclasses.fields(columns):
            ragged = getattr(columns, field.name)
            if isinstance(ragged, Ragged) and not _whole(ragged):
                raise facts.fail(RULE, f"the rows of {table.name}.{field.name} are torn")


def _whole(ragged: Ragged) -> bool:
    cuts = ragged.offsets
    return (
        len(cuts) > 0
        and int(cuts[0]) == 0
        and int(cuts[-1]) == len(ragged.items)
        and bool((np.diff(cuts) >= 0).all())
    )


def _lengths(facts: Facts) -> None:
    problem = facts.problem
    for layout, tokens, what in (
        (facts.q_layout, problem.q_len, "queries"),
        (facts.kv_layout, problem.kv_len, "keys"),
    ):
        if layout.length != tokens or layout.ranks != len(facts.nodes):
            raise facts.fail(
                RULE,
                f"the layout of {what} has {layout.length} tokens over {layout.ranks} ranks, the "
                f"problem {tokens} over {len(facts.nodes)}",
            )


def _ops(facts: Facts) -> None:
    tasks = facts.program.tasks
    limit = np.zeros(len(TASK_ORDER), dtype=np.int64)
    limit[TASK_ORDER.index(TaskKind.LOCAL)] = len(LOCAL_ORDER)
    limit[TASK_ORDER.index(TaskKind.COLLECTIVE)] = len(COLLECTIVE_ORDER)
    allowed = limit[tasks.kind]
    plain = allowed == 0
    wrong = np.where(plain, tasks.op != -1, (tasks.op < 0) | (tasks.op >= allowed))
    tiled = np.diff(tasks.tile.offsets) > 0
    wrong |= tiled & (tasks.kind != TASK_ORDER.index(TaskKind.COMPUTE))
    for task in np.flatnonzero(wrong).tolist():
        kind = TASK_ORDER[int(tasks.kind[task])]
        raise facts.fail(
            RULE,
            f"task {task} ({kind}) has op {int(tasks.op[task])} and {len(tasks.tile.row(task))} "
            "blocks, which its kind does not have",
        )


def _covers_ascend(facts: Facts) -> None:
    cover = facts.program.values.cover
    if not len(cover.items):
        return
    row = np.repeat(np.arange(len(cover)), np.diff(cover.offsets))
    wrong = np.flatnonzero((np.diff(row) == 0) & (np.diff(cover.items) <= 0))
    if wrong.size:
        index = int(row[wrong[0]])
        raise facts.fail(
            RULE, f"the cover of value {index}, {cover.row(index)}, does not name blocks once each"
        )


def blocks_are_the_mask(facts: Facts) -> None:
    """Blocks do not overlap, weigh what their kind says, and together hold every visible pair."""
    _weights(facts)
    c = facts.program.blocks
    order = np.lexsort((c.head_start, c.kv_chunk, c.q_chunk))
    q, kv, start, stop = (x[order] for x in (c.q_chunk, c.kv_chunk, c.head_start, c.head_stop))
    meet = (q[1:] == q[:-1]) & (kv[1:] == kv[:-1]) & (start[1:] < stop[:-1])
    for at in np.flatnonzero(meet).tolist():
        pair = sorted((int(order[at]), int(order[at + 1])))
        raise facts.fail("blocks", f"blocks {pair[0]} and {pair[1]} hold the same pairs")
    total = sum(c.weight.tolist())
    if total != facts.problem.visible_pairs:
        raise facts.fail(
            "blocks",
            f"blocks hold {total} visible pairs, the mask has {facts.problem.visible_pairs}: "
            "a block is missing, invented, or mis-weighed",
        )


def _weights(facts: Facts) -> None:
    c = facts.program.blocks
    rows = facts.q_layout.chunks.sizes()[c.q_chunk]
    columns = facts.kv_layout.chunks.sizes()[c.kv_chunk]
    heads = c.head_stop - c.head_start
    area = rows * columns * heads
    band = band_pairs(c.lo, c.hi, rows, columns) * heads
    wrong = (heads < 1) | (c.weight < 1) | (c.weight > area)
    wrong |= c.kind == BlockKind.EMPTY.code
    wrong |= (c.kind == BlockKind.FULL.code) & (c.weight != area)
    wrong |= (c.kind == BlockKind.BAND.code) & ((c.lo > c.hi) | (c.weight != band))
    for index in np.flatnonzero(wrong).tolist():
        raise facts.fail(
            "blocks",
            f"block {index}, {facts.blocks[index]}, of {int(rows[index])} x {int(columns[index])} "
            "tokens cannot weigh that",
        )


NUMBER_RULES = (numbers_in_range, blocks_are_the_mask)
