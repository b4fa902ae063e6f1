"""Launches joined by when they can run: sound, with the same work and traffic, and fewer."""

from __future__ import annotations

import numpy as np
import pytest
from tests.plans.samples import scattered, small

import ultraattn as ua
from ultraattn.cluster import Cluster
from ultraattn.planning.coarsen import WAYS, coarser
from ultraattn.plans import Compute, Pass, Program, check_program
from ultraattn.plans.account import account

MASKS = [ua.masks.full(), ua.masks.causal(), ua.masks.global_local()]


def launches(program: Program) -> int:
    return sum(isinstance(task, Compute) for task in program.task_views)


@pytest.mark.parametrize("pass_", Pass)
@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_coarser_programs_are_sound_and_do_and_move_the_same(
    mask: ua.masks.Mask, spread: bool, pass_: Pass
) -> None:
    plan = small(
        mask, seqlen=48, heads=4, kv_heads=2, ranks=3, chunks=6, head_groups=2, strategy="tile",
        effort="instant",
    )  # fmt: skip
    plan = scattered(plan) if spread else plan
    given, place = plan.pass_plan(pass_).program, plan.place.node_of
    made = dict(coarser(given, plan.problem, place))
    assert made
    assert set(made) <= set(WAYS)
    for program in made.values():
        check_program(pass_, plan.problem, plan.q_layout, plan.kv_layout, place, program)
        assert launches(program) < launches(given)
        before, after = (account(plan.problem, p, place) for p in (given, program))
        assert np.array_equal(before.load, after.load)
        assert np.array_equal(before.sent, after.sent)
    counts = [launches(made[way]) for way in WAYS if way in made]
    assert counts == sorted(counts, reverse=True)


def test_rows_of_one_head_range_that_wait_for_the_same_keys_are_one_launch_by_default() -> None:
    """Heads spread over the ranks: every rank needs all keys of its heads before most rows."""
    options = {"seqlen": 8192, "heads": 8, "head_dim": 128, "strategy": "tile", "head_groups": 4}
    cluster = Cluster.load("h200").resize(1, 4)
    plans = {
        effort: ua.plan(ua.masks.full(), cluster=cluster, effort=effort, **options)
        for effort in ("instant", "fast")
    }
    for pass_ in Pass:
        apart, joined = (plans[e].pass_plan(pass_).program for e in ("instant", "fast"))
        assert launches(joined) <= launches(apart) / 2
    times = {effort: ua.simulate(plan).makespan_s for effort, plan in plans.items()}
    assert times["fast"] < 0.8 * times["instant"]
