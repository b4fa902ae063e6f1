"""Arranged passes: never slower than what was given, sound, and with the same work and traffic."""

from __future__ import annotations

import numpy as np
import pytest

import ultraattn as ua
from ultraattn.planning.arrange import Arranger
from ultraattn.planning.tiling import Effort
from ultraattn.plans import Compute, Pass, Plan, check_program
from ultraattn.plans.account import account

MASKS = [ua.masks.causal(), ua.masks.star(), ua.masks.strided()]


def planned(mask: ua.masks.Mask, ranks: int, heads: int, cluster: str = "h200") -> Plan:
    return ua.plan(
        mask, seqlen=16384, heads=heads, head_dim=128, head_groups=1, strategy="tile",
        cluster=ua.Cluster.load(cluster).resize(1, ranks), effort="instant",
    )  # fmt: skip


def arranger(plan: Plan, pass_: Pass) -> Arranger:
    costs = ua.Cluster.load(plan.place.cluster).known_costs
    place = plan.place.node_of
    return Arranger(pass_, plan.problem, plan.q_layout, plan.kv_layout, place, costs)


def ranks_of_blocks(plan: Plan, pass_: Pass) -> list[int]:
    tasks = plan.pass_plan(pass_).program.task_views
    rank = {b: task.rank for task in tasks if isinstance(task, Compute) for b in task.tile}
    return [rank[block] for block in range(len(rank))]


@pytest.mark.parametrize("pass_", Pass)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_an_arrangement_is_sound_and_never_slower(
    mask: ua.masks.Mask, ranks: int, pass_: Pass
) -> None:
    plan = planned(mask, ranks, heads=2)
    given = plan.pass_plan(pass_).program
    arrange = arranger(plan, pass_)
    best = arrange.best(given.block_views, ranks_of_blocks(plan, pass_), given, Effort.NORMAL)
    place = plan.place.node_of
    check_program(pass_, plan.problem, plan.q_layout, plan.kv_layout, place, best.program)
    assert best.time_ns <= arrange.timed(given, ()).time_ns
    before, after = (account(plan.problem, p, place) for p in (given, best.program))
    assert np.array_equal(before.load, after.load)
    assert np.array_equal(before.sent, after.sent)


def test_few_heads_and_small_pieces_win_most() -> None:
    """As the paper says (section 6.4, Kernel-Level)."""
    gains = {}
    for heads in (1, 32):
        plan = planned(ua.masks.causal(), ranks=8, heads=heads)
        given = plan.forward.program
        arrange = arranger(plan, Pass.FORWARD)
        ranks = ranks_of_blocks(plan, Pass.FORWARD)
        best = arrange.best(given.block_views, ranks, given, Effort.NORMAL)
        gains[heads] = arrange.timed(given, ()).time_ns / best.time_ns
    assert gains[1] > gains[32] >= 1
    assert gains[1] > 1.2


def test_instant_leaves_the_program_alone() -> None:
    plan = planned(ua.masks.causal(), ranks=4, heads=2)
    given = plan.forward.program
    ranks = ranks_of_blocks(plan, Pass.FORWARD)
    arranged = arranger(plan, Pass.FORWARD).best(given.block_views, ranks, given, Effort.INSTANT)
    assert arranged.program is given
