"""Small valid plans of every shape, and programs with one number changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

import ultraattn as ua
from ultraattn.planning.graph import build_program
from ultraattn.plans import Block, Merge, Pass, Plan, Program, Task, check_program
from ultraattn.plans.columns import Ragged, column


def assigned(plan: Plan, rank_of: Callable[[Block], int]) -> Plan:
    """The plan with every block on the rank that `rank_of` gives."""
    passes = {}
    for pass_ in Pass:
        blocks = plan.pass_plan(pass_).program.block_views
        program = build_program(
            pass_,
            plan.problem,
            plan.q_layout,
            plan.kv_layout,
            plan.place.node_of,
            blocks,
            [rank_of(block) for block in blocks],
        )
        passes[pass_] = dataclasses.replace(plan.pass_plan(pass_), program=program)
    return dataclasses.replace(plan, forward=passes[Pass.FORWARD], backward=passes[Pass.BACKWARD])


def scattered(plan: Plan) -> Plan:
    """Blocks far from their owners, so that queries, keys and partial results all move."""
    return assigned(plan, lambda b: (b.q_chunk + 2 * b.kv_chunk + 3 * b.head_start) % plan.ranks)


def small(mask: ua.masks.Mask | None = None, **options: Any) -> Plan:
    """A plan in which every block's owner of queries computes it."""
    defaults: dict[str, Any] = {
        "seqlen": 24,
        "heads": 2,
        "head_dim": 4,
        "dtype": "float64",
        "ranks": 3,
        "strategy": "rows",
    }
    return ua.plan(mask or ua.masks.causal(), **(defaults | options))


def two_nodes(**options: Any) -> Plan:
    cluster = ua.Cluster.load("cpu").resize(nodes=2, gpus_per_node=2)
    return small(ua.masks.full(), cluster=cluster, ranks=None, **options)


SAMPLES: dict[str, Callable[[], Plan]] = {
    "rows": small,
    "zigzag": lambda: small(layout="zigzag"),
    "grouped heads": lambda: small(heads=6, kv_heads=2, head_groups=3),
    "cross": lambda: small(seqlen=10, kv_seqlen=29, ranks=2),
    "scattered": lambda: scattered(small(layout="zigzag")),
    "scattered heads": lambda: scattered(small(heads=6, kv_heads=2, head_groups=4)),
    "nodes": lambda: scattered(two_nodes()),
    "striped window": lambda: scattered(
        small(ua.masks.sliding_window(9), layout="striped", chunks=6)
    ),
    "unseen rows": lambda: small(
        ua.masks.from_ranges([(0, 9)], [(4, 20)], ["full"]), seqlen=24, chunks=6
    ),
    "fewer tokens than ranks": lambda: small(seqlen=2),
}


def check(plan: Plan, pass_: Pass, program: Program) -> None:
    check_program(pass_, plan.problem, plan.q_layout, plan.kv_layout, plan.place.node_of, program)


def with_table(program: Program, table: str, **columns: Any) -> Program:
    """The program with other columns in one table."""
    made = dataclasses.replace(getattr(program, table), **columns)
    return dataclasses.replace(program, **{table: made})


def with_number(program: Program, table: str, name: str, index: int, number: int) -> Program:
    """The program with one number of one column changed."""
    items = getattr(getattr(program, table), name).tolist()
    items[index] = number
    return with_table(program, table, **{name: column(items)})


def with_row(program: Program, table: str, name: str, index: int, row: Sequence[int]) -> Program:
    """The program with one row of one ragged column changed."""
    rows = getattr(getattr(program, table), name).rows()
    rows[index] = list(row)
    return with_table(program, table, **{name: Ragged.of(rows)})


def refused(plan: Plan, pass_: Pass, broken: Program, rule: str, *names: str) -> None:
    """`broken` is refused by `rule`, and the message holds each of `names`."""
    with pytest.raises(ua.PlanError) as caught:
        check(plan, pass_, broken)
    text = str(caught.value)
    assert text.startswith(f"{pass_} pass, {rule}: "), text
    for name in names:
        assert name in text


def first(tasks: Iterable[Task], kind: type[Task]) -> Task:
    return next(task for task in tasks if isinstance(task, kind))


def named(task: Task) -> str:
    return f"task {task.index} ({task.kind} on rank {task.rank})"


def last_merge(program: Program) -> Merge:
    """A merge of several partial results."""
    return max(
        (task for task in program.task_views if isinstance(task, Merge)),
        key=lambda task: len(task.reads),
    )
