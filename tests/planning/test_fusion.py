from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ultraattn as ua
from ultraattn.chunks import Chunk, Chunks
from ultraattn.errors import InputError
from ultraattn.masks.grid import BlockKind
from ultraattn.planning.dependency_graph import build_finest
from ultraattn.planning.fusion import Cost, Fuser, How, fuse, groups_like
from ultraattn.planning.fusion_candidates import KernelLimits, LinkLimits, candidates, is_rectangle
from ultraattn.planning.fusion_graph import Group, Work, contract
from ultraattn.plans.account import account
from ultraattn.plans.check import Pass, check_program
from ultraattn.plans.layout import Layout
from ultraattn.plans.plan import Plan
from ultraattn.plans.problem import Problem
from ultraattn.plans.program import (
    Block,
    Collective,
    CollectiveOp,
    Compute,
    Program,
    TaskKind,
    Transfer,
)
from ultraattn.plans.tensors import Tensor

TOKENS = 4
NODES = (0, 0)


def layout(owners: Sequence[int]) -> Layout:
    chunks = [Chunk(TOKENS * i, TOKENS * (i + 1)) for i in range(len(owners))]
    return Layout("test", Chunks.make(TOKENS * len(owners), chunks), tuple(owners), 2)


Q_LAYOUT, KV_LAYOUT = layout((0, 0, 1)), layout((0, 0, 1, 1))
"""Q2 in two rows and KV2 in two halves on rank 0; Q3 in one row and KV3 in two halves on rank 1."""


def worked_example() -> tuple[Problem, Program]:
    """The article's figure 5(a): B0 to B7 are Q2's rows, B8 and B9 are Q3's, over KV3 alone."""
    cells = [(q, k) for q in (0, 1) for k in range(4)] + [(2, 2), (2, 3)]
    blocks = [Block(q, k, 0, 1, BlockKind.FULL, 0, 0, TOKENS * TOKENS) for q, k in cells]
    pairs = sum(block.weight for block in blocks)
    problem = Problem("", "figure 5", "", pairs, 12, 16, 1, 1, 8, 8, "float64", 1.0)
    ranks = [0] * len(blocks)
    program = build_finest(Pass.FORWARD, problem, Q_LAYOUT, KV_LAYOUT, NODES, blocks, ranks)
    return problem, program


def linear(start: int, message: int = 0, gather: int = 0) -> Cost:
    """A launch of n blocks takes start + 4 n, a merge 1.

    A launch over rows or columns that do not lie together, some of them owned and some received,
    gathers them first. A message takes its start, and 24 for Q, 2 for a key chunk, 4 for O.
    """
    rows = {Tensor.Q: 24, Tensor.K: 2, Tensor.O: 4}

    def cost(works: Sequence[Work]) -> list[int]:
        out = []
        for work in works:
            if work.kind is TaskKind.COMPUTE:
                places = {(value.tensor, value.buffer < 0) for value in work.reads}
                apart = len(places) - len({value.tensor for value in work.reads})
                out.append(start + 4 * len(work.blocks) + gather * apart)
            elif work.kind in (TaskKind.TRANSFER, TaskKind.COLLECTIVE):
                out.append(message + sum(rows.get(value.tensor, 0) for value in work.writes))
            else:
                out.append(1)
        return out

    return cost


def of_figure(works: Sequence[Work]) -> Sequence[int]:
    """Costs that favour larger launches and messages of what lies together."""
    return linear(start=8, message=2, gather=40)(works)


def apart(works: Sequence[Work]) -> Sequence[int]:
    """Costs of launches that lose by being joined, as where the joined one fits the device ill."""
    return [
        length + 2 * (len(work.blocks) - 1) if work.blocks else length
        for work, length in zip(works, linear(start=0)(works), strict=True)
    ]


def tiles(program: Program) -> list[tuple[int, ...]]:
    return sorted(task.tile for task in program.task_views if isinstance(task, Compute))


def receives(program: Program, tensor: Tensor) -> int:
    """Messages that carry a tensor to rank 0."""
    return sum(
        any(program.value_views[v].tensor is tensor for v in task.writes)
        for task in program.task_views
        if isinstance(task, Transfer) and task.rank == 1
    )


@pytest.mark.parametrize("how", [How.GREEDY, How.SEARCH])
def test_ten_launches_become_three_and_two_receives_one_where_starts_cost(how: How) -> None:
    problem, program = worked_example()
    assert (len(tiles(program)), receives(program, Tensor.K)) == (10, 2)
    made = fuse(program, problem, NODES, of_figure, how=how)
    check_program(Pass.FORWARD, problem, Q_LAYOUT, KV_LAYOUT, NODES, made.program)
    assert tiles(made.program) == [(0, 1, 4, 5), (2, 3, 6, 7), (8, 9)]
    assert (receives(made.program, Tensor.K), receives(made.program, Tensor.Q)) == (1, 1)
    assert made.after < made.before


def test_launches_and_receives_stay_apart_where_joining_costs() -> None:
    problem, program = worked_example()
    made = fuse(program, problem, NODES, apart)
    assert tiles(made.program) == [(block,) for block in range(10)]
    assert receives(made.program, Tensor.K) == 2


def test_receives_stay_apart_where_waiting_for_both_costs_more_than_it_saves() -> None:
    """Own blocks last 48; half of KV3 arrives at 32, all of it, in one message, at 63."""
    problem, program = worked_example()

    def cost(works: Sequence[Work]) -> list[int]:
        out = []
        for work in works:
            halves = sum(value.tensor is Tensor.K for value in work.writes)
            if work.kind is TaskKind.TRANSFER:
                out.append(32 * halves - (halves > 1) + (halves < len(work.writes) - halves))
            else:
                out.append(12 * len(work.blocks) + max(0, len(work.blocks) - 1) or 1)
        return out

    fuser = Fuser(program, problem, NODES, cost)
    messages = [c for c in fuser.candidates if c.group.kind is TaskKind.TRANSFER]
    assert [candidate.gain for candidate in messages if len(candidate.group.tasks) == 2] == [1]
    made = fuser.choose(How.SEARCH)
    assert receives(made.program, Tensor.K) == 2


def test_a_launch_of_the_figure_is_a_rectangle() -> None:
    _, program = worked_example()
    blocks = program.block_views
    assert is_rectangle([blocks[b] for b in (0, 1, 4, 5)])
    assert not is_rectangle([blocks[b] for b in (0, 1, 4)])
    assert not is_rectangle([blocks[b] for b in (0, 5)])


def test_a_group_that_waits_for_itself_is_refused() -> None:
    _, program = worked_example()
    sends = [t for t in program.task_views if isinstance(t, Transfer)]
    there = next(t for t in sends if t.rank == 1)
    back = next(t for t in sends if t.rank == 0)
    group = Group((there.index, back.index), TaskKind.TRANSFER)
    assert contract(program, [group]) is None


def test_more_choices_than_can_all_be_tried_are_refused() -> None:
    problem, program = worked_example()
    fuser = Fuser(program, problem, NODES, of_figure)
    assert len(fuser.candidates) > 12
    with pytest.raises(InputError, match="of up to 12; use search"):
        fuser.choose(How.EXHAUSTIVE)


def test_a_cost_below_one_is_refused() -> None:
    problem, program = worked_example()
    with pytest.raises(InputError, match="finer quantum"):
        fuse(program, problem, NODES, lambda works: [0] * len(works))


MASKS = {
    "causal": ua.masks.causal(),
    "full": ua.masks.full(),
    "streaming": ua.masks.streaming(grid=6, local=2),
}


def finest(name: str, ranks: int, *, kv_heads: int = 2) -> Plan:
    """A plan whose launches are single blocks."""
    plan = ua.plan(
        MASKS[name], seqlen=24 * ranks, heads=2, kv_heads=kv_heads, head_dim=8, ranks=ranks,
        chunks=2 * ranks, dtype="float64", effort="instant",
    )  # fmt: skip
    passes = {}
    for pass_ in Pass:
        part = plan.pass_plan(pass_)
        rank_of = {
            block: task.rank
            for task in part.program.task_views
            if isinstance(task, Compute)
            for block in task.tile
        }
        blocks = part.program.block_views
        ranks_of = [rank_of[block] for block in range(len(blocks))]
        program = build_finest(
            pass_, plan.problem, plan.q_layout, plan.kv_layout, plan.place.node_of, blocks, ranks_of
        )
        passes[str(pass_)] = dataclasses.replace(part, program=program)
    return dataclasses.replace(plan, **passes)


PLANS = {(name, ranks): finest(name, ranks) for name in MASKS for ranks in (2, 3)}
SPREAD = {
    pass_: build_finest(
        pass_, PLANS["full", 3].problem, PLANS["full", 3].q_layout, PLANS["full", 3].kv_layout,
        (0, 0, 0), blocks, [(block.q_chunk + block.kv_chunk) % 3 for block in blocks],
    )
    for pass_ in Pass
    for blocks in [PLANS["full", 3].pass_plan(pass_).program.block_views]
}  # fmt: skip
"""Partial results of every rank for every other, of queries and (backward) of keys."""

limits = st.builds(
    KernelLimits,
    block_sets=st.booleans(),
    max_blocks=st.none() | st.integers(1, 6),
    kinds=st.frozensets(st.sampled_from([BlockKind.FULL, BlockKind.BAND, BlockKind.PARTIAL])),
)
links = st.builds(
    LinkLimits,
    collectives=st.frozensets(st.sampled_from(CollectiveOp)),
    messages=st.booleans(),
)


@settings(deadline=None, derandomize=True, max_examples=40)
@given(limits, links, st.sampled_from(sorted(PLANS)), st.sampled_from(list(Pass)))
def test_nothing_that_a_kernel_or_link_cannot_take_is_proposed(
    kernel: KernelLimits, link: LinkLimits, name: tuple[str, int], pass_: Pass
) -> None:
    program = PLANS[name].pass_plan(pass_).program
    for group in candidates(program, kernel, link):
        views = [program.task_views[task] for task in group.tasks]
        assert len(views) > 1
        if group.kind is TaskKind.COMPUTE:
            assert len({view.rank for view in views}) == 1
            held = [program.block_views[b] for v in views if isinstance(v, Compute) for b in v.tile]
            assert {block.kind for block in held} <= kernel.kinds
            assert kernel.max_blocks is None or len(held) <= kernel.max_blocks
            assert kernel.block_sets or is_rectangle(held)
        elif group.op is not None:
            assert group.op in link.collectives
        else:
            assert link.messages
            ends = {(v.rank, tuple({program.value_views[w].rank for w in v.writes})) for v in views}
            assert len(ends) == 1


@settings(deadline=None, derandomize=True, max_examples=40)
@given(st.data(), limits, links, st.sampled_from(sorted(PLANS)), st.sampled_from(list(Pass)))
def test_random_fusions_stay_sound_and_move_the_same_bytes(
    data: st.DataObject,
    kernel: KernelLimits,
    link: LinkLimits,
    name: tuple[str, int],
    pass_: Pass,
) -> None:
    plan = PLANS[name]
    program = plan.pass_plan(pass_).program
    found = candidates(program, kernel, link)
    groups: list[Group] = []
    for index in data.draw(st.permutations(range(len(found)))):
        tasks = {task for group in groups for task in group.tasks}
        apart = not tasks.intersection(found[index].tasks)
        if apart and contract(program, [*groups, found[index]]) is not None:
            groups.append(found[index])
    graph = contract(program, groups)
    assert graph is not None
    made = graph.finish(plan.problem, plan.place.node_of)
    nodes = plan.place.node_of
    check_program(pass_, plan.problem, plan.q_layout, plan.kv_layout, nodes, made)
    before, after = (account(plan.problem, p, nodes) for p in (program, made))
    for what in ("load", "sent", "received"):
        assert getattr(before, what).tolist() == getattr(after, what).tolist()


@settings(deadline=None, derandomize=True, max_examples=20)
@given(limits, st.sampled_from(sorted(PLANS)), st.sampled_from(list(Pass)))
def test_choices_from_elsewhere_are_cut_to_what_the_kernel_takes(
    kernel: KernelLimits, name: tuple[str, int], pass_: Pass
) -> None:
    plan = PLANS[name]
    program = plan.pass_plan(pass_).program
    whole = [
        Group(tuple(t.index for t in program.task_views if isinstance(t, Compute) and t.rank == r),
              TaskKind.COMPUTE)
        for r in range(plan.ranks)
    ]  # fmt: skip
    fuser = Fuser(
        program, plan.problem, plan.place.node_of, linear(start=9, message=1), kernel,
        LinkLimits(messages=False), seeds=[whole],
    )  # fmt: skip
    for task in fuser.choose(How.SEARCH, rounds=1).program.task_views:
        if isinstance(task, Compute):
            assert kernel.takes([program.block_views[block] for block in task.tile])


def test_launches_like_another_programs_are_found() -> None:
    plan = PLANS["full", 2]
    program = plan.forward.program
    fuser = Fuser(program, plan.problem, plan.place.node_of, linear(start=9, message=1))
    fused = fuser.choose().program
    graph = contract(program, groups_like(program, fused))
    assert graph is not None
    assert tiles(graph.finish(plan.problem, plan.place.node_of)) == tiles(fused)


def test_transfers_to_all_become_one_all_gather() -> None:
    plan = PLANS["full", 3]
    link = LinkLimits(frozenset({CollectiveOp.ALL_GATHER}), messages=False)
    program = plan.forward.program
    found = [g for g in candidates(program, KernelLimits(), link) if g.op is not None]
    graph = contract(program, found[:1])
    assert graph is not None
    made = graph.finish(plan.problem, plan.place.node_of)
    gathers = [task for task in made.task_views if isinstance(task, Collective)]
    assert [task.op for task in gathers] == [CollectiveOp.ALL_GATHER]
    check_program(
        Pass.FORWARD, plan.problem, plan.q_layout, plan.kv_layout, plan.place.node_of, made
    )


@pytest.mark.parametrize("pass_", list(Pass))
def test_partial_results_for_all_become_one_reduce_scatter_of_queries_and_one_of_keys(
    pass_: Pass,
) -> None:
    plan, program = PLANS["full", 3], SPREAD[pass_]
    link = LinkLimits(frozenset({CollectiveOp.REDUCE_SCATTER}), messages=False)
    groups = [g for g in candidates(program, KernelLimits(), link) if g.op is not None]
    assert len(groups) == (1 if pass_ is Pass.FORWARD else 2)
    graph = contract(program, groups)
    assert graph is not None
    made = graph.finish(plan.problem, plan.place.node_of)
    check_program(pass_, plan.problem, plan.q_layout, plan.kv_layout, plan.place.node_of, made)
    scatters = [task for task in made.task_views if isinstance(task, Collective)]
    assert {task.op for task in scatters} == {CollectiveOp.REDUCE_SCATTER}
    results = {program.value_views[v] for v in range(len(program.values.rank))
               if program.values.buffer[v] < 0 and program.producers[v] >= 0}  # fmt: skip
    assert {made.value_views[v]._replace(buffer=-1) for t in scatters for v in t.writes} == {
        result for result in results if result.tensor in pass_.results
    }
    before, after = (account(plan.problem, p, (0, 0, 0)) for p in (program, made))
    assert before.sent.tolist() == after.sent.tolist()


def test_partial_results_of_some_pairs_of_ranks_are_no_reduce_scatter() -> None:
    link = LinkLimits(frozenset({CollectiveOp.REDUCE_SCATTER}), messages=False)
    program = PLANS["causal", 3].backward.program
    assert not [g for g in candidates(program, KernelLimits(), link) if g.op is not None]


@pytest.mark.parametrize("pass_", list(Pass))
def test_joined_launches_leave_no_merge_that_only_copies(pass_: Pass) -> None:
    plan = PLANS["full", 2]
    program = plan.pass_plan(pass_).program
    by_rank = [
        Group(tuple(t.index for t in program.task_views if isinstance(t, Compute) and t.rank == r),
              TaskKind.COMPUTE)
        for r in range(2)
    ]  # fmt: skip
    graph = contract(program, by_rank)
    assert graph is not None
    made = graph.finish(plan.problem, plan.place.node_of)
    merges = [task for task in made.task_views if task.kind is TaskKind.MERGE]
    owned = len(plan.q_layout.chunks) if pass_ is Pass.FORWARD else 0
    assert all(made.value_views[v].buffer < 0 for task in merges for v in task.writes)
    assert len(merges) >= owned


@settings(deadline=None, derandomize=True, max_examples=10)
@given(
    st.integers(1, 40), st.integers(1, 40), st.sampled_from(sorted(PLANS)),
    st.sampled_from(list(Pass)),
)  # fmt: skip
def test_looking_further_is_never_worse_than_greedy_nor_better_than_exhaustive(
    start: int, message: int, name: tuple[str, int], pass_: Pass
) -> None:
    plan = PLANS[name]
    fuser = Fuser(
        plan.pass_plan(pass_).program, plan.problem, plan.place.node_of,
        linear(start=start, message=message), most=6,
    )  # fmt: skip
    none = fuser.score(())
    greedy, further, every = (fuser.choose(how).after for how in How)
    assert none is not None
    assert every <= further <= greedy <= none[0]
