from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ultraattn as ua
from ultraattn.errors import InputError, PlanError
from ultraattn.planning.schedule import schedule
from ultraattn.planning.schedule_program import jobs_of, renumber, reorder
from ultraattn.planning.tiling import Effort
from ultraattn.plans.check import Pass, check_program
from ultraattn.plans.columns import Ragged
from ultraattn.plans.plan import Plan
from ultraattn.plans.program import Program, StreamColumns

PLANS = {
    "causal": ua.plan(
        ua.masks.causal(), seqlen=37, heads=4, kv_heads=2, head_dim=8, ranks=3, effort="instant"
    ),
    "global_local": ua.plan(
        ua.masks.global_local(), seqlen=64, heads=2, head_dim=8, ranks=4, effort="instant"
    ),
}


def check(plan: Plan, pass_: Pass, program: Program) -> None:
    check_program(pass_, plan.problem, plan.q_layout, plan.kv_layout, plan.place.node_of, program)


@settings(deadline=None, derandomize=True, max_examples=25)
@given(st.data(), st.sampled_from(sorted(PLANS)), st.sampled_from(list(Pass)))
def test_a_program_in_any_valid_order_is_sound(data: st.DataObject, name: str, pass_: Pass) -> None:
    plan = PLANS[name]
    program = plan.pass_plan(pass_).program
    depends = program.tasks.depends_on.rows()
    later: dict[int, list[int]] = defaultdict(list)
    for task, before in enumerate(depends):
        for other in before:
            later[other].append(task)
    waiting = [len(row) for row in depends]
    ready = [task for task, count in enumerate(waiting) if not count]
    order = []
    while ready:
        task = ready.pop(data.draw(st.integers(0, len(ready) - 1)))
        order.append(task)
        for other in later[task]:
            waiting[other] -= 1
            if not waiting[other]:
                ready.append(other)
    check(plan, pass_, renumber(program, order))


@settings(deadline=None, derandomize=True, max_examples=10)
@given(st.data(), st.sampled_from(sorted(PLANS)), st.sampled_from(list(Pass)))
def test_streams_follow_the_schedule(data: st.DataObject, name: str, pass_: Pass) -> None:
    plan = PLANS[name]
    program = plan.pass_plan(pass_).program
    count = len(program.tasks.rank)
    durations = data.draw(st.lists(st.integers(1, 50), min_size=count, max_size=count))
    jobs = jobs_of(program, durations)
    made = schedule(jobs, Effort.FAST)
    after = reorder(program, made)
    check(plan, pass_, after)
    order = np.argsort(made.start, kind="stable")
    for row in after.streams.tasks.rows():
        starts = made.start[order[row]].tolist()
        assert starts == sorted(starts)


def test_an_order_against_a_dependency_is_refused() -> None:
    program = PLANS["causal"].forward.program
    with pytest.raises(InputError, match="on which it depends"):
        renumber(program, list(reversed(range(len(program.tasks.rank)))))


def test_reordering_against_a_dependency_would_not_pass_the_check() -> None:
    plan = PLANS["causal"]
    program = plan.forward.program
    streams = program.streams
    rows = [list(reversed(row)) for row in streams.tasks.rows()]
    broken = Program(
        program.blocks,
        program.values,
        program.tasks,
        StreamColumns(streams.rank, streams.kind, Ragged.of(rows)),
        program.buffers,
    )
    with pytest.raises(PlanError):
        check(plan, Pass.FORWARD, broken)


def test_a_task_on_no_stream_is_named() -> None:
    program = PLANS["causal"].forward.program
    streams = program.streams
    rows = [[task for task in row if task != 1] for row in streams.tasks.rows()]
    broken = Program(
        program.blocks,
        program.values,
        program.tasks,
        StreamColumns(streams.rank, streams.kind, Ragged.of(rows)),
        program.buffers,
    )
    with pytest.raises(InputError, match=r"task 1 \(\w+ on rank \d\) has no stream"):
        jobs_of(broken, [1] * len(program.tasks.rank))


def test_a_missing_duration_is_refused() -> None:
    with pytest.raises(InputError, match="give one a task"):
        jobs_of(PLANS["causal"].forward.program, [1, 2])
