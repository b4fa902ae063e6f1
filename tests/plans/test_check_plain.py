"""What a program plainly keeps, by its columns, each rule finds kept too, task by task."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import pytest

import ultraattn as ua
from tests.plans.samples import SAMPLES
from tests.plans.test_check_property import TABLES, changed
from ultraattn.plans import Pass, Plan, Program
from ultraattn.plans.check import TASK_RULES
from ultraattn.plans.check.facts import Facts
from ultraattn.plans.check.numbers import NUMBER_RULES
from ultraattn.plans.check.plain import Plain

BOTH = pytest.mark.parametrize("pass_", list(Pass))


def facts_of(plan: Plan, pass_: Pass, program: Program) -> Facts:
    return Facts(pass_, plan.problem, plan.q_layout, plan.kv_layout, plan.place.node_of, program)


def in_range(facts: Facts) -> bool:
    try:
        for rule in NUMBER_RULES:
            rule(facts)
    except ua.PlanError:
        return False
    return True


@BOTH
@pytest.mark.parametrize("name", list(SAMPLES))
def test_no_changed_plan_plainly_keeps_a_rule_that_it_breaks(name: str, pass_: Pass) -> None:
    plan = SAMPLES[name]()
    whole = plan.pass_plan(pass_).program
    draw = random.Random(f"{name} {pass_}")
    found: Counter[bool] = Counter()
    for table in TABLES:
        for field in dataclasses.fields(getattr(whole, table)):
            for _ in range(6):
                program = changed(whole, table, field.name, draw)
                if program is None or not in_range(facts := facts_of(plan, pass_, program)):
                    continue
                plain = Plain(facts)
                for rule in TASK_RULES:
                    kept = getattr(plain, rule.__name__)()
                    found[kept] += 1
                    if kept:
                        rule(facts)  # Would raise.
                    else:
                        break  # A rule may rely on those before it.
    assert found[True] > 100
    assert found[False] > 20


@BOTH
@pytest.mark.parametrize("strategy", ["tile", "ring", "heads", "allgather", "mesh", "double_ring"])
def test_ordinary_plans_keep_every_rule_plainly(strategy: str, pass_: Pass) -> None:
    plan = ua.plan(
        ua.masks.causal(), seqlen=256, heads=8, kv_heads=8, head_dim=16, strategy=strategy,
        cluster=ua.Cluster.load("h100").resize(2, 4), effort="fast",
    )  # fmt: skip
    plain = Plain(facts_of(plan, pass_, plan.pass_plan(pass_).program))
    assert [rule.__name__ for rule in TASK_RULES if not getattr(plain, rule.__name__)()] == []
