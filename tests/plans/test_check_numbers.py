"""Numbers that name nothing, torn tables, and buffers given away too early are refused."""

from __future__ import annotations

import dataclasses

import pytest

import ultraattn as ua
from tests.plans.samples import (
    check,
    last_merge,
    named,
    refused,
    scattered,
    small,
    with_number,
    with_row,
    with_table,
)
from ultraattn.plans import Compute, Pass, Plan, Program
from ultraattn.plans.columns import Ragged, column

BOTH = pytest.mark.parametrize("pass_", list(Pass))


@pytest.fixture(scope="module")
def plan() -> Plan:
    return scattered(small(layout="zigzag"))


def shared_buffers(program: Program, earlier: int, later: int) -> Program:
    """`later` stands in the buffer of `earlier`, made large enough."""
    buffer = int(program.values.buffer[earlier])
    size = int(program.buffers.bytes.max())
    broken = with_number(program, "buffers", "bytes", buffer, size)
    return with_number(broken, "values", "buffer", later, buffer)


@BOTH
def test_a_value_used_after_its_buffer_is_given_away(plan: Plan, pass_: Pass) -> None:
    """An arrival takes the buffer of a partial result that is merged later."""
    program = plan.pass_plan(pass_).program
    merge = last_merge(program)
    part = max(merge.reads, key=lambda v: program.producers[v])
    other = min(
        (
            v
            for v in merge.reads
            if v != part and program.value_views[v].rank == program.value_views[part].rank
        ),
        key=lambda v: program.producers[v],
    )
    broken = shared_buffers(program, other, part)
    buffer = int(program.values.buffer[other])
    refused(
        plan,
        pass_,
        broken,
        "buffers",
        f"reuses buffer {buffer}",
        program.value_views[other].place(),
    )


@BOTH
def test_a_buffer_may_be_used_again_when_its_value_is_done(pass_: Pass) -> None:
    """A launch writes where an arrival of an earlier, finished launch stood: this is sound."""
    plan = small(ua.masks.full(), ranks=4)
    program = plan.pass_plan(pass_).program
    mine = [t for t in program.task_views if isinstance(t, Compute) and t.rank == 0]
    arrived = next(
        v
        for v in mine[1].reads
        if program.values.buffer[v] >= 0
        and [t.index for t in program.task_views if v in t.reads] == [mine[1].index]
    )
    check(plan, pass_, shared_buffers(program, arrived, mine[2].writes[0]))
    broken = shared_buffers(program, arrived, mine[1].writes[0])
    refused(plan, pass_, broken, "buffers", named(mine[1]))


def test_a_buffer_that_is_too_small_or_elsewhere(plan: Plan) -> None:
    program = plan.forward.program
    size, rank = int(program.buffers.bytes[0]), int(program.buffers.rank[0])
    broken = with_number(program, "buffers", "bytes", 0, size - 1)
    refused(plan, Pass.FORWARD, broken, "buffers", f"needs {size} bytes")
    broken = with_number(program, "buffers", "rank", 0, (rank + 1) % plan.ranks)
    refused(plan, Pass.FORWARD, broken, "buffers", f"on rank {(rank + 1) % plan.ranks}")


PLAIN = [
    (table, field)
    for table, fields in {
        "blocks": "q_chunk kv_chunk head_start head_stop kind weight lo hi",
        "values": "tensor chunk row_start row_stop head_start head_stop rank wide buffer",
        "tasks": "kind op rank",
        "streams": "rank kind",
        "buffers": "rank bytes",
    }.items()
    for field in fields.split()
]
RAGGED = [
    ("values", "cover"),
    ("tasks", "reads"),
    ("tasks", "writes"),
    ("tasks", "depends_on"),
    ("tasks", "tile"),
    ("streams", "tasks"),
]


@pytest.mark.parametrize(
    ("table", "name", "number"),
    [
        (*place, number)
        for place in PLAIN
        for number in (-(2**62) - 9, -5, 2**62 + 9)
        if place[1] not in ("lo", "hi") or number != -5
    ],
)
def test_numbers_that_name_nothing(plan: Plan, table: str, name: str, number: int) -> None:
    broken = with_number(plan.forward.program, table, name, 1, number)
    refused(plan, Pass.FORWARD, broken, "blocks" if name == "weight" else "numbers in range")


@pytest.mark.parametrize("number", [-1, 10**6])
@pytest.mark.parametrize(("table", "name"), RAGGED)
def test_names_of_what_does_not_exist(plan: Plan, table: str, name: str, number: int) -> None:
    program = plan.forward.program
    rows = getattr(getattr(program, table), name).rows()
    index = next(i for i, row in enumerate(rows) if row)
    broken = with_row(program, table, name, index, [number, *rows[index][1:]])
    refused(plan, Pass.FORWARD, broken, "numbers in range", str(number))


def test_torn_columns(plan: Plan) -> None:
    program = plan.forward.program
    broken = with_table(program, "values", rank=column(program.values.rank[:-1]))
    refused(plan, Pass.FORWARD, broken, "numbers in range", "values", "lengths")
    reads = program.tasks.reads
    torn = Ragged(column([*reads.offsets[:-1].tolist(), int(reads.offsets[-1]) - 1]), reads.items)
    refused(plan, Pass.FORWARD, with_table(program, "tasks", reads=torn), "numbers in range")


def test_a_cover_that_names_a_block_twice(plan: Plan) -> None:
    program = plan.forward.program
    index = next(i for i, value in enumerate(program.value_views) if value.cover)
    cover = program.value_views[index].cover
    broken = with_row(program, "values", "cover", index, [*cover, cover[-1]])
    refused(plan, Pass.FORWARD, broken, "numbers in range", f"value {index}")


def test_a_layout_of_another_length(plan: Plan) -> None:
    other = small(seqlen=25, layout="zigzag")
    broken = dataclasses.replace(plan, q_layout=other.q_layout)
    with pytest.raises(ua.PlanError, match="25 tokens over 3 ranks, the problem 24"):
        broken.check()
