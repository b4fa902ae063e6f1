"""Each way to break a valid plan is caught, and the rule and its task or value are named."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import pytest

from tests.plans.samples import (
    SAMPLES,
    first,
    last_merge,
    named,
    refused,
    scattered,
    small,
    two_nodes,
    with_number,
    with_row,
    with_table,
)
from ultraattn.planning.graph import build_program
from ultraattn.plans import (
    Compute,
    LocalOp,
    Pass,
    Plan,
    Program,
    StreamKind,
    Task,
    TaskKind,
    Tensor,
    Transfer,
)
from ultraattn.plans.columns import Ragged, column
from ultraattn.plans.program import LOCAL_ORDER, STREAM_ORDER, TASK_ORDER

BOTH = pytest.mark.parametrize("pass_", list(Pass))


@pytest.fixture(scope="module")
def plan() -> Plan:
    return scattered(small(layout="zigzag"))


def partial_transfer(program: Program, pass_: Pass) -> Transfer:
    """A transfer that carries a partial result to its owner."""
    return next(
        task
        for task in program.task_views
        if isinstance(task, Transfer) and program.value_views[task.reads[0]].tensor in pass_.results
    )


@pytest.mark.parametrize("name", list(SAMPLES))
def test_valid_plans_pass(name: str) -> None:
    SAMPLES[name]().check()


@BOTH
def test_a_block_computed_twice(plan: Plan, pass_: Pass) -> None:
    program = plan.pass_plan(pass_).program
    one, other = [task for task in program.task_views if isinstance(task, Compute)][:2]
    broken = with_row(program, "tasks", "tile", other.index, [*other.tile, one.tile[0]])
    refused(
        plan, pass_, broken, "each block once", f"block {one.tile[0]}", named(one), named(other)
    )


@BOTH
def test_a_block_never_computed(plan: Plan, pass_: Pass) -> None:
    program = plan.pass_plan(pass_).program
    task = first(program.task_views, Compute)
    assert isinstance(task, Compute)
    broken = with_row(program, "tasks", "tile", task.index, task.tile[1:])
    refused(plan, pass_, broken, "each block once", f"block {task.tile[0]} ", "never computed")


@BOTH
def test_a_block_left_out_of_the_table(plan: Plan, pass_: Pass) -> None:
    blocks = plan.pass_plan(pass_).program.block_views[1:]
    ranks = [plan.q_layout.owners[block.q_chunk] for block in blocks]
    broken = build_program(
        pass_, plan.problem, plan.q_layout, plan.kv_layout, plan.place.node_of, blocks, ranks
    )
    refused(plan, pass_, broken, "blocks", str(plan.problem.visible_pairs), "missing")


@BOTH
def test_blocks_that_hold_the_same_pairs(plan: Plan, pass_: Pass) -> None:
    blocks = plan.pass_plan(pass_).program.block_views
    twice = [blocks[0], *blocks]
    ranks = [plan.q_layout.owners[block.q_chunk] for block in twice]
    broken = build_program(
        pass_, plan.problem, plan.q_layout, plan.kv_layout, plan.place.node_of, twice, ranks
    )
    refused(plan, pass_, broken, "blocks", "blocks 0 and 1 hold the same pairs")


@pytest.mark.parametrize(("kind", "change"), [("full", 1), ("band", 1), ("band", -1), ("full", -1)])
def test_a_weight_that_its_kind_cannot_have(plan: Plan, kind: str, change: int) -> None:
    program = plan.forward.program
    index = next(i for i, block in enumerate(program.block_views) if block.kind == kind)
    weight = program.block_views[index].weight
    broken = with_number(program, "blocks", "weight", index, weight + change)
    refused(plan, Pass.FORWARD, broken, "blocks", f"block {index}")


def test_a_band_that_is_moved(plan: Plan) -> None:
    program = plan.forward.program
    index = next(i for i, block in enumerate(program.block_views) if block.kind == "band")
    lo = program.block_views[index].lo
    broken = with_number(program, "blocks", "lo", index, lo + 1)
    refused(plan, Pass.FORWARD, broken, "blocks", f"block {index}")


@BOTH
def test_a_transfer_that_nobody_receives(plan: Plan, pass_: Pass) -> None:
    program = plan.pass_plan(pass_).program
    task = first(program.task_views, Transfer)
    unsent = next(
        index
        for index, value in enumerate(program.value_views)
        if value.rank == task.rank and program.producers[index] < 0 and index not in task.reads
    )
    broken = with_row(program, "tasks", "reads", task.index, [*task.reads, unsent])
    refused(plan, pass_, broken, "both ends", named(task), program.value_views[unsent].place())


@BOTH
def test_a_value_that_is_delivered_but_not_sent(plan: Plan, pass_: Pass) -> None:
    program = plan.pass_plan(pass_).program
    task = next(t for t in program.task_views if isinstance(t, Transfer) and len(t.reads) > 1)
    broken = with_row(program, "tasks", "reads", task.index, task.reads[:1])
    lost = program.value_views[task.writes[-1]]
    refused(plan, pass_, broken, "both ends", named(task), lost.place())


@BOTH
def test_a_value_that_nothing_writes(plan: Plan, pass_: Pass) -> None:
    program = plan.pass_plan(pass_).program
    task = first(program.task_views, Transfer)
    broken = with_row(program, "tasks", "writes", task.index, task.writes[1:])
    lost = program.value_views[task.writes[0]]
    refused(plan, pass_, broken, "one source a value", lost.place())


@BOTH
def test_a_value_with_two_sources(plan: Plan, pass_: Pass) -> None:
    program = plan.pass_plan(pass_).program
    one, other = [task for task in program.task_views if isinstance(task, Compute)][:2]
    broken = with_row(program, "tasks", "writes", other.index, [*other.writes, one.writes[0]])
    refused(plan, pass_, broken, "one source a value", named(one), named(other))


@BOTH
def test_a_transfer_to_its_own_rank(plan: Plan, pass_: Pass) -> None:
    program = plan.pass_plan(pass_).program
    task = first(program.task_views, Transfer)
    broken = with_number(program, "values", "rank", task.writes[0], task.rank)
    refused(plan, pass_, broken, "places", named(task), "to its own rank")


@BOTH
def test_a_transfer_from_a_rank_without_the_value(plan: Plan, pass_: Pass) -> None:
    program = plan.pass_plan(pass_).program
    task = first(program.task_views, Transfer)
    target = program.value_views[task.writes[0]].rank
    other = next(rank for rank in range(plan.ranks) if rank not in (task.rank, target))
    broken = with_number(program, "tasks", "rank", task.index, other)
    refused(plan, pass_, broken, "places", f"task {task.index} (transfer on rank {other})")


@BOTH
def test_a_task_that_reads_from_another_rank(plan: Plan, pass_: Pass) -> None:
    program = plan.pass_plan(pass_).program
    task = first(program.task_views, Compute)
    far = next(
        index
        for index, value in enumerate(program.value_views)
        if value.rank != task.rank and program.producers[index] < 0
    )
    broken = with_row(program, "tasks", "reads", task.index, [*task.reads, far])
    refused(plan, pass_, broken, "places", named(task), program.value_views[far].place())


@BOTH
def test_a_launch_without_one_of_its_inputs(plan: Plan, pass_: Pass) -> None:
    program = plan.pass_plan(pass_).program
    task = first(program.task_views, Compute)
    for number in task.reads:
        rest = [read for read in task.reads if read != number]
        broken = with_row(program, "tasks", "reads", task.index, rest)
        value = program.value_views[number]
        expected = f"without all of {value.tensor} of chunk {value.chunk}"
        refused(plan, pass_, broken, "inputs of a tile", named(task), expected)


@pytest.mark.parametrize("tensor", [Tensor.DO, Tensor.O])
def test_a_delta_without_one_of_its_inputs(plan: Plan, tensor: Tensor) -> None:
    program = plan.backward.program
    task = next(t for t in program.task_views if getattr(t, "op", None) is LocalOp.DELTA)
    rest = [read for read in task.reads if program.value_views[read].tensor is not tensor]
    broken = with_row(program, "tasks", "reads", task.index, rest)
    refused(plan, Pass.BACKWARD, broken, "inputs of a delta", named(task), f"of {tensor}")


@BOTH
def test_an_input_that_comes_too_late(plan: Plan, pass_: Pass) -> None:
    program = plan.pass_plan(pass_).program
    task = next(t for t in program.task_views if isinstance(t, Compute) and t.depends_on)
    for producer in task.depends_on:
        rest = [other for other in task.depends_on if other != producer]
        broken = with_row(program, "tasks", "depends_on", task.index, rest)
        late = named(program.task_views[producer])
        refused(plan, pass_, broken, "inputs in time", named(task), f"without waiting for {late}")


@BOTH
def test_a_cycle(plan: Plan, pass_: Pass) -> None:
    program = plan.pass_plan(pass_).program
    task = next(t for t in program.task_views if isinstance(t, Compute) and t.depends_on)
    before = program.task_views[task.depends_on[0]]
    broken = with_row(
        program, "tasks", "depends_on", before.index, [*before.depends_on, task.index]
    )
    refused(plan, pass_, broken, "no cycle", named(task), named(before))


@BOTH
def test_a_task_that_waits_for_itself(plan: Plan, pass_: Pass) -> None:
    program = plan.pass_plan(pass_).program
    broken = with_row(program, "tasks", "depends_on", 0, [0])
    refused(plan, pass_, broken, "no cycle", named(program.task_views[0]))


@BOTH
def test_an_order_that_does_not_follow_the_numbers(plan: Plan, pass_: Pass) -> None:
    """Acyclic, but two independent launches of a rank stand on its stream in falling order."""
    program = plan.pass_plan(pass_).program
    index, launches = next(
        (index, [t for t in stream.tasks if isinstance(program.task_views[t], Compute)])
        for index, stream in enumerate(program.stream_views)
        if stream.kind is StreamKind.COMPUTE
    )
    row = program.streams.tasks.row(index)
    at = row.index(launches[0])
    assert row[at + 1] == launches[1]
    row[at], row[at + 1] = row[at + 1], row[at]
    broken = with_row(program, "streams", "tasks", index, row)
    names = [named(program.task_views[launch]) for launch in launches[:2]]
    refused(plan, pass_, broken, "order of issue", *names)


def swapped(program: Program, kinds: Iterable[StreamKind]) -> tuple[Program, int, int]:
    """Two transfers between one pair of ranks, exchanged on its streams of some kinds."""
    codes = [STREAM_ORDER.index(kind) for kind in kinds]
    pairs: dict[tuple[int, int], list[int]] = {}
    for task in program.task_views:
        if isinstance(task, Transfer):
            pairs.setdefault((task.rank, program.value_views[task.writes[0]].rank), []).append(
                task.index
            )
    a, b = next(tasks for tasks in pairs.values() if len(tasks) > 1)[:2]
    rows = program.streams.tasks.rows()
    for row, kind in zip(rows, program.streams.kind.tolist(), strict=True):
        if kind in codes and a in row and b in row:
            i, j = row.index(a), row.index(b)
            row[i], row[j] = b, a
    return with_table(program, "streams", tasks=Ragged.of(rows)), a, b


@BOTH
@pytest.mark.parametrize("side", [StreamKind.SEND, StreamKind.RECEIVE])
def test_two_orders_on_two_ranks(plan: Plan, pass_: Pass, side: StreamKind) -> None:
    broken, a, b = swapped(plan.pass_plan(pass_).program, [side])
    refused(plan, pass_, broken, "one order", str(a), str(b))


def test_two_orders_on_two_nodes() -> None:
    plan = scattered(two_nodes(chunks=8))
    broken, a, b = swapped(plan.forward.program, [StreamKind.SEND_BETWEEN_NODES, StreamKind.SEND])
    refused(plan, Pass.FORWARD, broken, "one order", str(a), str(b))


@BOTH
def test_a_missing_stream(plan: Plan, pass_: Pass) -> None:
    program = plan.pass_plan(pass_).program
    for index, stream in enumerate(program.stream_views):
        keep = [i for i in range(len(program.stream_views)) if i != index]
        broken = with_table(
            program,
            "streams",
            rank=column(program.streams.rank[keep]),
            kind=column(program.streams.kind[keep]),
            tasks=Ragged.of([program.streams.tasks.row(i) for i in keep]),
        )
        refused(plan, pass_, broken, "streams", f"{stream.kind} of rank {stream.rank}")


@BOTH
def test_a_receive_that_is_missing(plan: Plan, pass_: Pass) -> None:
    program = plan.pass_plan(pass_).program
    index, stream = next(
        (i, s) for i, s in enumerate(program.stream_views) if s.kind is StreamKind.RECEIVE
    )
    broken = with_row(program, "streams", "tasks", index, stream.tasks[1:])
    refused(plan, pass_, broken, "streams", named(program.task_views[stream.tasks[0]]), "both ends")


@BOTH
def test_a_stream_that_is_there_twice(plan: Plan, pass_: Pass) -> None:
    program = plan.pass_plan(pass_).program
    s = program.streams
    broken = with_table(
        program,
        "streams",
        rank=column([*s.rank.tolist(), int(s.rank[0])]),
        kind=column([*s.kind.tolist(), int(s.kind[0])]),
        tasks=Ragged.of([*s.tasks.rows(), []]),
    )
    first_one = program.stream_views[0]
    refused(plan, pass_, broken, "streams", f"rank {first_one.rank} has two {first_one.kind}")


@BOTH
def test_a_task_that_is_twice_on_a_stream(plan: Plan, pass_: Pass) -> None:
    program = plan.pass_plan(pass_).program
    row = program.streams.tasks.row(0)
    broken = with_row(program, "streams", "tasks", 0, [row[0], *row])
    refused(plan, pass_, broken, "streams", named(program.task_views[row[0]]))


@BOTH
def test_a_partial_merged_twice(plan: Plan, pass_: Pass) -> None:
    program = plan.pass_plan(pass_).program
    task = last_merge(program)
    broken = with_row(program, "tasks", "reads", task.index, [*task.reads, task.reads[0]])
    refused(plan, pass_, broken, "merges", named(task), "exactly once")


@BOTH
def test_a_partial_left_out_of_its_merge(plan: Plan, pass_: Pass) -> None:
    program = plan.pass_plan(pass_).program
    task = last_merge(program)
    tensor = program.value_views[task.reads[-1]].tensor
    cover = program.value_views[task.reads[-1]].cover
    rest = [
        read
        for read in task.reads
        if program.value_views[read].cover != cover or tensor not in pass_.results
    ]
    broken = with_row(program, "tasks", "reads", task.index, rest)
    refused(plan, pass_, broken, "merges", named(task), "exactly once")


@BOTH
def test_a_partial_that_is_lost_with_its_cover(plan: Plan, pass_: Pass) -> None:
    """The merge owns up to it: its result says that it holds fewer blocks."""
    program = plan.pass_plan(pass_).program
    task = last_merge(program)
    lost = set(program.value_views[task.reads[-1]].cover)
    rest = [read for read in task.reads if set(program.value_views[read].cover) != lost]
    broken = with_row(program, "tasks", "reads", task.index, rest)
    for number in task.writes:
        kept = [block for block in program.value_views[number].cover if block not in lost]
        broken = with_row(broken, "values", "cover", number, kept)
    refused(plan, pass_, broken, "partials once", "not wholly", f"for blocks {sorted(lost)}")


@BOTH
def test_a_partial_sent_to_two_ranks(plan: Plan, pass_: Pass) -> None:
    program = plan.pass_plan(pass_).program
    task = partial_transfer(program, pass_)
    target = program.value_views[task.writes[0]].rank
    other = next(rank for rank in range(plan.ranks) if rank not in (task.rank, target))
    values = program.values
    count, buffers = len(values.rank), len(program.buffers.rank)
    added = {
        f.name: column([*getattr(values, f.name).tolist(), int(getattr(values, f.name)[v])])
        for v in task.writes[:1]
        for f in dataclasses.fields(values)
        if f.name != "cover"
    }
    rows = [*values.cover.rows(), values.cover.row(task.writes[0])]
    broken = with_table(program, "values", cover=Ragged.of(rows), **added)
    broken = with_number(broken, "values", "rank", count, other)
    broken = with_number(broken, "values", "buffer", count, buffers)
    size = int(program.buffers.bytes[values.buffer[task.writes[0]]])
    broken = with_table(
        broken,
        "buffers",
        rank=column([*program.buffers.rank.tolist(), other]),
        bytes=column([*program.buffers.bytes.tolist(), size]),
    )
    broken = with_row(broken, "tasks", "writes", task.index, [*task.writes, count])
    receive = STREAM_ORDER.index(StreamKind.RECEIVE)
    at = next(
        i for i, s in enumerate(program.stream_views) if (s.rank, s.kind) == (other, "receive")
    )
    assert program.streams.kind[at] == receive
    row = sorted([*program.streams.tasks.row(at), task.index])
    broken = with_row(broken, "streams", "tasks", at, row)
    refused(plan, pass_, broken, "partials once", "more than once")


@BOTH
def test_a_result_that_does_not_reach_its_owner(plan: Plan, pass_: Pass) -> None:
    """The last merge writes to a workspace buffer instead of the caller's tensor."""
    program = plan.pass_plan(pass_).program
    output = next(
        i
        for i, value in enumerate(program.value_views)
        if value.buffer < 0 and program.producers[i] >= 0
    )
    value = program.value_views[output]
    broken = with_table(
        program,
        "buffers",
        rank=column([*program.buffers.rank.tolist(), value.rank]),
        bytes=column([*program.buffers.bytes.tolist(), 10**6]),
    )
    broken = with_number(broken, "values", "buffer", output, len(program.buffers.rank))
    refused(plan, pass_, broken, "partials once", value.place(), "not wholly")


def fill_of(program: Program) -> Task:
    return next(t for t in program.task_views if getattr(t, "op", None) is LocalOp.FILL)


@BOTH
def test_rows_that_nothing_fills(pass_: Pass) -> None:
    plan = SAMPLES["unseen rows"]()
    program = plan.pass_plan(pass_).program
    value = program.value_views[fill_of(program).writes[0]]
    broken = program
    for number in fill_of(program).writes:
        broken = with_number(broken, "values", "row_stop", number, value.row_stop - 1)
    text = f"{value.tensor} of chunk {value.chunk} does not reach its owner, rank {value.rank}"
    refused(plan, pass_, broken, "results", text)


@BOTH
def test_a_launch_without_blocks(pass_: Pass) -> None:
    plan = SAMPLES["unseen rows"]()
    program = plan.pass_plan(pass_).program
    fill = fill_of(program)
    broken = with_number(program, "tasks", "kind", fill.index, TASK_ORDER.index(TaskKind.COMPUTE))
    broken = with_number(broken, "tasks", "op", fill.index, -1)
    refused(plan, pass_, broken, "outputs of a tile", f"task {fill.index} ", "no block")


@BOTH
def test_a_result_given_for_a_row_without_blocks(plan: Plan, pass_: Pass) -> None:
    """A launch that also gives a result of a chunk that none of its blocks is in."""
    unseen = SAMPLES["unseen rows"]()
    program = unseen.pass_plan(pass_).program
    fill = fill_of(program)
    task = next(t for t in program.task_views if isinstance(t, Compute) and t.rank == fill.rank)
    broken = with_row(program, "tasks", "writes", task.index, [*task.writes, *fill.writes])
    broken = with_row(broken, "tasks", "writes", fill.index, [])
    refused(unseen, pass_, broken, "outputs of a tile", named(task), "for blocks []")


def test_a_fill_in_place_of_a_merge(plan: Plan) -> None:
    program = plan.forward.program
    task = last_merge(program)
    broken = with_number(program, "tasks", "kind", task.index, TASK_ORDER.index(TaskKind.LOCAL))
    broken = with_number(broken, "tasks", "op", task.index, LOCAL_ORDER.index(LocalOp.FILL))
    refused(plan, Pass.FORWARD, broken, "work", f"task {task.index} (local", "fill cannot make")


def test_an_output_without_its_lse(plan: Plan) -> None:
    program = plan.forward.program
    task = first(program.task_views, Compute)
    lse = next(n for n in task.writes if program.value_views[n].tensor is Tensor.LSE)
    rest = list(program.value_views[lse].cover)[:-1]
    broken = with_row(program, "values", "cover", lse, rest)
    refused(plan, Pass.FORWARD, broken, "work", named(task), "without one")


def test_a_merge_that_adds_up_inputs(plan: Plan) -> None:
    """Two copies of a key chunk are no partial results."""
    program = plan.forward.program
    task = last_merge(program)
    broken = with_number(program, "values", "tensor", task.writes[0], Tensor.K.code)
    refused(plan, Pass.FORWARD, broken, "work", named(task), "cannot make k of chunk")
