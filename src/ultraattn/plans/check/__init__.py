"""Proves a program sound without running it: nothing lost, nothing twice, nothing that can hang.

Each rule is one function over `Facts` that raises `PlanError` with the rule's name first. The
rules stand in the order in which a fault is easiest to read: numbers before places, places before
order, order before coverage. Rules that look at tasks and values one by one run only where the
columns as a whole do not show that they hold (`plain`).
"""

from __future__ import annotations

from collections.abc import Sequence

from ultraattn.plans.check.buffers import BUFFER_RULES
from ultraattn.plans.check.covers import COVER_RULES
from ultraattn.plans.check.facts import Facts
from ultraattn.plans.check.numbers import NUMBER_RULES
from ultraattn.plans.check.order import ORDER_RULES
from ultraattn.plans.check.places import PLACE_RULES
from ultraattn.plans.check.plain import Plain
from ultraattn.plans.layout import Layout
from ultraattn.plans.passes import Pass
from ultraattn.plans.problem import Problem
from ultraattn.plans.program import Program

__all__ = ["Pass", "check_program"]

TASK_RULES = (*PLACE_RULES, *ORDER_RULES, *COVER_RULES, *BUFFER_RULES)


def check_program(
    pass_: Pass,
    problem: Problem,
    q_layout: Layout,
    kv_layout: Layout,
    nodes: Sequence[int],
    program: Program,
    forward: Program | None = None,
) -> None:
    """Raises PlanError, naming the rule and the task or value, where the program is unsound.

    `forward` is the plan's forward program, found sound before: backward may keep inputs of it.
    """
    facts = Facts(pass_, problem, q_layout, kv_layout, nodes, program, forward)
    for rule in NUMBER_RULES:
        rule(facts)
    plain = Plain(facts)
    for rule in TASK_RULES:
        if not getattr(plain, rule.__name__)():
            rule(facts)
