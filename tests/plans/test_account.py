"""Work and traffic are read off the program: the worked numbers of the ledger, and what scales."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import numpy as np
import pytest

import ultraattn as ua
from tests.plans.samples import SAMPLES, assigned, scattered, small, two_nodes
from ultraattn.plans import Collective, Pass, Plan, TaskKind, Tensor, Transfer
from ultraattn.plans.account import collective_moves, moves_of, value_bytes

FIRST_COLUMN_AND_DIAGONAL = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]]
ASSIGNMENT = {
    (0, 0): 0, (1, 0): 0,
    (1, 1): 1, (2, 2): 1,
    (2, 0): 2, (3, 0): 2,
    (3, 3): 3,
}  # fmt: skip


def worked_example(**options: Any) -> Plan:
    """Design, The numbers: N = P = 4, first column plus diagonal, one of the 24 optima."""
    plan = small(
        ua.masks.from_blocks(FIRST_COLUMN_AND_DIAGONAL), seqlen=16, ranks=4, heads=1, **options
    )
    return assigned(plan, lambda b: ASSIGNMENT[b.q_chunk, b.kv_chunk])


def moved(plan: Plan, pass_: Pass) -> dict[str, set[tuple[int, int, int]]]:
    """What crosses ranks: (source, target, chunk) of query chunks, key chunks and their results."""
    found: dict[str, set[tuple[int, int, int]]] = defaultdict(set)
    program = plan.pass_plan(pass_).program
    names = {
        Tensor.Q: "row_in", Tensor.K: "col_in", Tensor.O: "row_out", Tensor.DQ: "row_out",
        Tensor.DK: "col_out",
    }  # fmt: skip
    for task in program.task_views:
        if isinstance(task, Transfer):
            for number in task.writes:
                value = program.value_views[number]
                if value.tensor in names:
                    key = (task.rank, value.rank, value.chunk)
                    assert key not in found[names[value.tensor]], "sent twice"
                    found[names[value.tensor]].add(key)
    return found


def ledger(plan: Plan, pass_: Pass, units: dict[str, int]) -> list[tuple[int, ...]]:
    """A, B, C, D, recv, send of every rank, from the transfers of the program."""
    crossing = moved(plan, pass_)
    rows = []
    for rank in range(plan.ranks):
        a = len({m for m in crossing["row_in"] if m[1] == rank})
        b = len({m for m in crossing["col_in"] if m[1] == rank})
        c = len({m for m in crossing["row_in"] if m[0] == rank})
        d = len({m for m in crossing["col_in"] if m[0] == rank})
        received = sum(units[k] * sum(m[1] == rank for m in crossing[k]) for k in units)
        sent = sum(units[k] * sum(m[0] == rank for m in crossing[k]) for k in units)
        rows.append((a, b, c, d, received, sent))
    return rows


def test_ledger_of_the_worked_example() -> None:
    units = {"row_in": 1, "col_in": 2, "row_out": 1, "col_out": 0}
    assert ledger(worked_example(), Pass.FORWARD, units) == [
        (1, 0, 0, 1, 1, 3),
        (1, 1, 1, 0, 4, 2),
        (1, 1, 1, 1, 4, 4),
        (0, 0, 1, 0, 1, 1),
    ]


@pytest.mark.parametrize("pass_", list(Pass))
def test_the_ledgers_formula_holds_for_the_transfers(pass_: Pass) -> None:
    """recv = A row_in + B col_in + C row_out + D col_out, and send the other way."""
    units = {
        Pass.FORWARD: {"row_in": 1, "col_in": 2, "row_out": 1, "col_out": 0},
        Pass.BACKWARD: {"row_in": 2, "col_in": 2, "row_out": 1, "col_out": 2},
    }[pass_]
    for a, b, c, d, received, sent in ledger(worked_example(), pass_, units):
        assert received == (
            a * units["row_in"] + b * units["col_in"] + c * units["row_out"] + d * units["col_out"]
        )
        assert sent == (
            c * units["row_in"] + d * units["col_in"] + a * units["row_out"] + b * units["col_out"]
        )


@pytest.mark.parametrize(("dtype", "element", "wide"), [("float64", 8, 8), ("bfloat16", 2, 4)])
def test_bytes_of_the_worked_example(dtype: str, element: int, wide: int) -> None:
    """4 rows a chunk, one head, head_dim 4: Q 16 elements, K with V 32, O 16 and its LSE 4."""
    q, kv = 16 * element, 32 * element
    o, do, lse = 16 * element + 4 * wide, 16 * element, 4 * wide
    forward = {"row_in": q, "col_in": kv, "row_out": o, "col_out": 0}
    backward = {"row_in": q + do + 2 * lse, "col_in": kv, "row_out": q, "col_out": kv}
    plan = worked_example(dtype=dtype)
    for pass_, units in ((Pass.FORWARD, forward), (Pass.BACKWARD, backward)):
        costs = plan.account(pass_)
        rows = ledger(plan, pass_, units)
        assert costs.received.tolist() == [row[4] for row in rows]
        assert costs.sent.tolist() == [row[5] for row in rows]


def test_each_rank_its_own_row_has_maximum_6() -> None:
    units = {"row_in": 1, "col_in": 2, "row_out": 1, "col_out": 0}
    plan = assigned(worked_example(), lambda b: b.q_chunk)
    assert max(max(row[4:]) for row in ledger(plan, Pass.FORWARD, units)) == 6


def test_star_on_contiguous_rows_is_40_percent_over() -> None:
    """Design: the last of 8 ranks has 0.875 of a cell of star's 4 x 4 grid, the mean is 0.625."""
    tokens, heads = 4096, 2
    plan = small(ua.masks.star(), seqlen=tokens, ranks=8, heads=heads)
    cell = (tokens // 4) ** 2 * heads
    load = plan.forward_account.load
    # The diagonal of 4 cells holds half of a token's pair more than half of its cells.
    assert load[-1] / cell == pytest.approx(0.875, abs=1e-3)
    assert load.mean() / cell == pytest.approx(0.625, abs=1e-3)
    assert plan.forward_account.load_over_mean == pytest.approx(1.4, abs=1e-3)


@pytest.mark.parametrize("name", list(SAMPLES))
@pytest.mark.parametrize("pass_", list(Pass))
def test_loads_are_the_visible_pairs(name: str, pass_: Pass) -> None:
    plan = SAMPLES[name]()
    p = plan.problem
    mask = ua.masks.registry.from_spec(json.loads(p.mask))
    truth = mask.dense(np.arange(p.q_len), np.arange(p.kv_len), ua.masks.Lengths(p.q_len, p.kv_len))
    assert plan.account(pass_).load.sum() == truth.sum() * p.heads == p.visible_pairs


def test_rows_load_a_rank_with_what_its_queries_see() -> None:
    plan = small(layout="zigzag", seqlen=50)
    for rank in range(plan.ranks):
        pairs = int((plan.positions(rank) + 1).sum())
        assert plan.forward_account.load[rank] == pairs * plan.problem.heads


@pytest.mark.parametrize("name", list(SAMPLES))
@pytest.mark.parametrize("pass_", list(Pass))
def test_all_that_is_sent_is_received(name: str, pass_: Pass) -> None:
    costs = SAMPLES[name]().account(pass_)
    assert costs.sent.sum() == costs.received.sum()
    assert costs.sent_between_nodes.sum() == costs.received_between_nodes.sum()
    assert (costs.sent_between_nodes <= costs.sent).all()
    assert costs.max_volume == max(costs.sent.max(), costs.received.max())


@pytest.mark.parametrize("pass_", list(Pass))
def test_traffic_scales_with_kv_heads_not_heads(pass_: Pass) -> None:
    """Rows move keys and values alone: four times the query heads move not a byte more."""

    def sent(heads: int, kv_heads: int) -> int:
        plan = small(ua.masks.full(), heads=heads, kv_heads=kv_heads)
        return int(plan.account(pass_).sent.sum())

    assert sent(8, 2) == sent(2, 2) > 0
    assert sent(8, 4) == 2 * sent(8, 2)
    assert sent(8, 8) == 4 * sent(8, 2)


@pytest.mark.parametrize("pass_", list(Pass))
def test_head_ranges_that_share_a_key_head_fetch_it_once(pass_: Pass) -> None:
    one, four = (
        small(ua.masks.full(), heads=8, kv_heads=2, head_groups=groups) for groups in (1, 4)
    )
    assert four.account(pass_).sent.tolist() == one.account(pass_).sent.tolist()


def test_traffic_between_nodes_is_what_crosses_them() -> None:
    plan = scattered(two_nodes())
    for pass_ in Pass:
        program, costs = plan.pass_plan(pass_).program, plan.account(pass_)
        sizes = value_bytes(plan.problem, program)
        far = np.zeros(plan.ranks, dtype=np.int64)
        for task in program.task_views:
            for number in task.writes:
                target = program.value_views[number].rank
                if task.kind is TaskKind.TRANSFER and task.rank // 2 != target // 2:
                    far[task.rank] += sizes[number]
        assert far.sum() > 0
        assert costs.sent_between_nodes.tolist() == far.tolist()
        assert costs.sent.sum() > far.sum()


def test_work_without_pairs_is_level() -> None:
    plan = small(seqlen=0)
    assert plan.forward_account.load_over_mean == 1.0
    assert plan.forward_account.max_volume == 0


@pytest.mark.parametrize("pass_", list(Pass))
@pytest.mark.parametrize("strategy", ["allgather", "heads", "heads_ring:2x2", "heads_ring:4x1"])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_columns_and_views_agree_on_what_a_collective_moves(
    strategy: str, kv_heads: int, pass_: Pass
) -> None:
    plan = ua.plan(
        ua.masks.causal(), seqlen=64, heads=8, kv_heads=kv_heads, head_dim=4, ranks=4,
        strategy=strategy, effort="instant",
    )  # fmt: skip
    program = plan.pass_plan(pass_).program
    values = dict(enumerate(program.value_views))
    found = 0
    for task in program.task_views:
        if isinstance(task, Collective):
            found += 1
            moves = sorted(tuple(move) for move in moves_of(program, task.index).tolist())
            assert moves == sorted(collective_moves(values, task))
    assert found
