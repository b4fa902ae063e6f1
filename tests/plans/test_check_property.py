"""Whatever number of a plan is changed: the check refuses it, or it still runs right on paper."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import pytest

import ultraattn as ua
from tests.plans.interpret import Interpreter, UnsoundError
from tests.plans.samples import SAMPLES, check, scattered, small, with_number, with_row
from ultraattn.plans import Pass, Plan, Program
from ultraattn.plans.columns import Ragged

SEEDS = range(3)
BOTH = pytest.mark.parametrize("pass_", list(Pass))
TABLES = ("values", "tasks", "streams", "buffers")


def sound(plan: Plan, pass_: Pass, program: Program) -> bool:
    try:
        for seed in SEEDS:
            Interpreter(plan, pass_, program, seed).run()
    except UnsoundError:
        return False
    return True


def accepted(plan: Plan, pass_: Pass, program: Program) -> bool:
    try:
        check(plan, pass_, program)
    except ua.PlanError:
        return False
    return True


def changed(program: Program, table: str, name: str, draw: random.Random) -> Program | None:
    """One number changed; or an item of a row changed, dropped, doubled or exchanged."""
    columns = getattr(getattr(program, table), name)
    if not isinstance(columns, Ragged):
        index = draw.randrange(len(columns))
        number = draw.choice(
            [int(draw.choice(columns)), int(columns[index]) + draw.choice([-1, 1])]
        )
        return with_number(program, table, name, index, number)
    filled = [i for i in range(len(columns)) if columns.row(i)]
    index = draw.choice(filled)
    row = columns.row(index)
    at = draw.randrange(len(row))
    way = draw.randrange(4)
    if way == 0:
        row[at] = int(draw.choice(columns.items))
    elif way == 1:
        del row[at]
    elif way == 2:
        row.insert(draw.randrange(len(row) + 1), row[at])
    else:
        row.append(int(draw.choice(columns.items)))
    return with_row(program, table, name, index, row)


@BOTH
@pytest.mark.parametrize("name", list(SAMPLES))
def test_valid_plans_run_on_paper(name: str, pass_: Pass) -> None:
    plan = SAMPLES[name]()
    assert sound(plan, pass_, plan.pass_plan(pass_).program)


@BOTH
@pytest.mark.parametrize("name", ["rows", "scattered", "grouped heads", "scattered heads", "nodes"])
def test_a_changed_plan_is_refused_or_still_right(name: str, pass_: Pass) -> None:
    plan = SAMPLES[name]()
    program = plan.pass_plan(pass_).program
    draw = random.Random(f"{name} {pass_}")
    outcomes: Counter[tuple[bool, bool]] = Counter()
    for table in TABLES:
        for field in dataclasses.fields(getattr(program, table)):
            for _ in range(8):
                broken = changed(program, table, field.name, draw)
                if broken == program:
                    continue
                passed = accepted(plan, pass_, broken)
                right = passed and sound(plan, pass_, broken)
                assert right or not passed, (table, field.name)
                outcomes[passed, right] += 1
    refused = outcomes[False, False]
    assert refused > 0.7 * outcomes.total()


@BOTH
def test_what_is_wrong_on_paper_is_refused(pass_: Pass) -> None:
    """The paper run finds faults by itself, and the check finds each of them too."""
    plan = scattered(small(seqlen=12, ranks=3))
    program = plan.pass_plan(pass_).program
    draw = random.Random(str(pass_))
    wrong = 0
    for name in ("reads", "writes", "tile", "depends_on"):
        for _ in range(25):
            broken = changed(program, "tasks", name, draw)
            unsound = not sound(plan, pass_, broken)
            wrong += unsound
            assert not unsound or not accepted(plan, pass_, broken)
    assert wrong > 40
