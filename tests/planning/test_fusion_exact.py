"""Plans under random fusions and random valid orders are exact, move the planned bytes, and run in
the planned order, on real processes."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.plans.samples import assigned, small

import ultraattn as ua
from ultraattn.planning.dependency_graph import build_finest
from ultraattn.planning.fusion_candidates import KernelLimits, LinkLimits, candidates
from ultraattn.planning.fusion_graph import Group, contract
from ultraattn.planning.schedule_program import renumber
from ultraattn.plans import Pass, Plan
from ultraattn.plans.account import account
from ultraattn.plans.program import CollectiveOp, Compute, Program
from ultraattn.runtime.dense import dense_attention, dense_backward
from ultraattn.runtime.local import LocalRanks
from ultraattn.runtime.together import Together
from workers.order import recorded

BATCH, LIMIT = 2, 1e-10
Pool = Callable[[int], LocalRanks]

LIMITS = (
    (KernelLimits(), LinkLimits()),
    (KernelLimits(block_sets=False, max_blocks=4), LinkLimits(messages=False)),
    (KernelLimits(), LinkLimits(frozenset(CollectiveOp))),
)
MASKS = {
    "causal": ua.masks.causal(),
    "global_local": ua.masks.global_local(),
    "streaming": ua.masks.streaming(),
}


def shaken(plan: Plan, pass_: Pass, draw: random.Random) -> Program:
    """The finest graph of a pass under random fusions, in a random valid order."""
    given = plan.pass_plan(pass_).program
    rank_of = {
        block: task.rank
        for task in given.task_views
        if isinstance(task, Compute)
        for block in task.tile
    }
    blocks = given.block_views
    program = build_finest(
        pass_, plan.problem, plan.q_layout, plan.kv_layout, plan.place.node_of, blocks,
        [rank_of[block] for block in range(len(blocks))],
    )  # fmt: skip
    found = candidates(program, *draw.choice(LIMITS))
    draw.shuffle(found)
    groups: list[Group] = []
    for group in found[:20]:
        taken = {task for other in groups for task in other.tasks}
        apart = not taken.intersection(group.tasks)
        if apart and contract(program, [*groups, group]) is not None:
            groups.append(group)
    graph = contract(program, groups)
    assert graph is not None
    fused = graph.finish(plan.problem, plan.place.node_of)
    costs = [account(plan.problem, p, plan.place.node_of) for p in (given, fused)]
    assert costs[0].sent.tolist() == costs[1].sent.tolist()
    assert costs[0].received.tolist() == costs[1].received.tolist()
    return renumber(fused, any_order(fused, draw))


def any_order(program: Program, draw: random.Random) -> list[int]:
    waiting = [set(row) for row in program.tasks.depends_on.rows()]
    order: list[int] = []
    ready = [task for task, before in enumerate(waiting) if not before]
    while ready:
        done = ready.pop(draw.randrange(len(ready)))
        order.append(done)
        for task, before in enumerate(waiting):
            if done in before:
                before.remove(done)
                if not before:
                    ready.append(task)
    return order


def tensors(plan: Plan) -> dict[str, torch.Tensor]:
    p, draw = plan.problem, torch.Generator().manual_seed(5)
    shapes = {
        "q": (BATCH, p.heads, p.q_len, p.head_dim),
        "k": (BATCH, p.kv_heads, p.kv_len, p.head_dim),
        "v": (BATCH, p.kv_heads, p.kv_len, p.value_dim),
        "do": (BATCH, p.heads, p.q_len, p.value_dim),
    }
    return {n: torch.randn(s, generator=draw, dtype=torch.float64) for n, s in shapes.items()}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("name", "ranks", "kv_heads"), [("causal", 2, 2), ("global_local", 3, 1), ("streaming", 4, 2)]
)
def test_shaken_plans_are_exact_and_move_the_planned_bytes(
    name: str, ranks: int, kv_heads: int, seed: int, local_ranks: Pool
) -> None:
    mask, draw = MASKS[name], random.Random(f"{name} {seed}")
    plan = small(
        mask, seqlen=16 * ranks + 3, heads=2, kv_heads=kv_heads, ranks=ranks, chunks=2 * ranks,
        strategy="tile", effort="instant",
    )  # fmt: skip
    passes = {
        str(p): dataclasses.replace(plan.pass_plan(p), program=shaken(plan, p, draw)) for p in Pass
    }
    check_runs(dataclasses.replace(plan, **passes), mask, local_ranks)


def test_collectives_in_place_of_messages_are_exact_and_move_the_planned_bytes(
    local_ranks: Pool,
) -> None:
    mask, ranks = ua.masks.full(), 3
    plan = small(
        mask, seqlen=51, heads=2, kv_heads=1, ranks=ranks, chunks=ranks, strategy="tile",
        effort="instant",
    )  # fmt: skip
    plan = assigned(plan, lambda block: (block.q_chunk + block.kv_chunk) % ranks)
    passes, found = {}, set()
    for pass_ in Pass:
        part = plan.pass_plan(pass_)
        links = LinkLimits(frozenset(CollectiveOp), messages=False)
        groups: list[Group] = []
        for group in candidates(part.program, KernelLimits(), links):
            apart = not {t for other in groups for t in other.tasks}.intersection(group.tasks)
            if group.op is not None and apart and contract(part.program, [*groups, group]):
                groups.append(group)
        graph = contract(part.program, groups)
        assert graph is not None
        program = graph.finish(plan.problem, plan.place.node_of)
        passes[str(pass_)] = dataclasses.replace(part, program=program)
        found |= {group.op for group in groups}
    assert CollectiveOp.REDUCE_SCATTER in found
    assert len(found) > 1
    check_runs(dataclasses.replace(plan, **passes), mask, local_ranks)


def check_runs(plan: Plan, mask: ua.masks.Mask, local_ranks: Pool) -> None:
    """Exact, with the planned bytes, in the planned order, on real processes."""
    plan.check()
    given = tensors(plan)
    results = local_ranks(plan.ranks).run(recorded, plan, given)
    for index, pass_ in enumerate(Pass):
        counted = np.array([result["bytes"][index] for result in results])
        assert counted[:, 0].tolist() == (BATCH * plan.account(pass_).sent).tolist()
    for rank, result in enumerate(results):
        programs = plan.for_rank(rank)
        planned = [
            (str(pass_), task.index)
            for pass_ in Pass
            for task in getattr(programs, str(pass_)).tasks
        ]
        assert result["trace"] == planned
    found = {
        what: plan.unshard([result[what] for result in results], 2, keys=what in ("dk", "dv"))
        for what in ("out", "dq", "dk", "dv")
    }
    expected = dense(plan, mask, given)
    for what, exact in expected.items():
        error = (found[what] - exact).norm() / exact.norm()
        assert error <= LIMIT, f"{what}: {error}"


EVERY = {
    "full": ua.masks.full(),
    "window": ua.masks.sliding_window(7),
    "document": ua.masks.document([5, 19, 12]),
    "strided": ua.masks.strided(grid=8, period=2, width=2),
    "star": ua.masks.star(),
    **MASKS,
}


@settings(deadline=None, derandomize=True, max_examples=16)
@given(
    name=st.sampled_from(sorted(EVERY)),
    ranks=st.integers(1, 4),
    heads=st.sampled_from([(2, 1), (4, 4), (4, 2)]),
    groups=st.sampled_from([1, 2]),
    layout=st.sampled_from(["contiguous", "zigzag", "striped"]),
    seed=st.integers(0, 2**16),
)
def test_any_plan_is_exact_under_random_fusions_in_any_valid_order(
    name: str, ranks: int, heads: tuple[int, int], groups: int, layout: str, seed: int
) -> None:
    mask, draw = EVERY[name], random.Random(seed)
    plan = small(
        mask, seqlen=36, heads=heads[0], kv_heads=heads[1], ranks=ranks, head_groups=groups,
        layout=layout, strategy="tile", effort="instant",
    )  # fmt: skip
    plan = assigned(plan, lambda block: draw.randrange(ranks))
    passes = {
        str(p): dataclasses.replace(plan.pass_plan(p), program=shaken(plan, p, draw)) for p in Pass
    }
    made = dataclasses.replace(plan, **passes)
    made.check()
    given_tensors, run = tensors(made), Together(made)
    q, k, v, do = (given_tensors[x] for x in ("q", "k", "v", "do"))
    out, lse = run.forward(q, k, v)
    assert [s.transport.bytes_sent for s in run.sessions] == (
        BATCH * plan.account(Pass.FORWARD).sent
    ).tolist()
    found = dict(zip(("dq", "dk", "dv"), run.backward(do, q, k, v, out, lse), strict=True))
    for what, exact in dense(made, mask, given_tensors).items():
        error = ((found | {"out": out})[what] - exact).norm() / exact.norm()
        assert error <= LIMIT, f"{what}: {error}"


def dense(
    plan: Plan, mask: ua.masks.Mask, given: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    p = plan.problem
    lengths = ua.masks.Lengths(p.q_len, p.kv_len)
    truth = mask.dense(np.arange(p.q_len), np.arange(p.kv_len), lengths)
    visible = torch.from_numpy(truth[0])
    q, k, v = given["q"], given["k"], given["v"]
    grads = dense_backward(given["do"], q, k, v, visible, p.scale)
    out = dense_attention(q, k, v, visible, p.scale)[0]
    return {"out": out, **dict(zip(("dq", "dk", "dv"), grads, strict=True))}
