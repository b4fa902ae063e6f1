"""Every kind of task, written by hand, passes the check, runs, and gives what dense attention does.

Relays, early merges, stripes, collectives, local work, several targets, shared buffers: no
planner need emit them for the runtime to be right about them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import ultraattn as ua
from tests.plans.samples import small
from tests.runtime.hand_made import Hand, with_program
from tests.runtime.hand_made_programs import (
    all_gather,
    broadcast,
    cast,
    columns,
    double_buffered,
    early_merge,
    filled_elsewhere,
    head_parallel,
    partial_stripes,
    relay,
    row_launch,
    stripes,
)
from ultraattn.plans import LocalOp, Pass, Plan, Tensor
from ultraattn.runtime.dense import dense_attention, dense_backward
from ultraattn.runtime.local import LocalRanks
from workers.attention import attend

BATCH = 2
Pool = Callable[[int], LocalRanks]
BOTH = pytest.mark.parametrize("pass_", list(Pass))


def base(mask: ua.masks.Mask | None = None, **options: Any) -> Plan:
    """Uneven chunks, grouped heads, values of a width of their own."""
    defaults = {"seqlen": 23, "heads": 4, "kv_heads": 2, "value_dim": 3, "ranks": 3}
    return small(mask or ua.masks.full(), **(defaults | options))


def tensors(plan: Plan) -> dict[str, torch.Tensor]:
    p, draw = plan.problem, torch.Generator().manual_seed(5)
    shapes = {
        "q": (BATCH, p.heads, p.q_len, p.head_dim),
        "k": (BATCH, p.kv_heads, p.kv_len, p.head_dim),
        "v": (BATCH, p.kv_heads, p.kv_len, p.value_dim),
        "do": (BATCH, p.heads, p.q_len, p.value_dim),
    }
    dtype = getattr(torch, p.dtype)
    return {
        name: torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype)
        for name, shape in shapes.items()
    }


def run(plan: Plan, local_ranks: Pool) -> dict[str, torch.Tensor]:
    """Checks and runs a plan; the whole tensors. Counts of bytes must be the plan's."""
    plan.check()
    results = local_ranks(plan.ranks).run(attend, plan, tensors(plan))
    for index, pass_ in enumerate(Pass):
        costs = plan.account(pass_)
        counted = np.array([result["bytes"][index] for result in results])
        assert counted[:, 0].tolist() == (BATCH * costs.sent).tolist()
        assert counted[:, 1].tolist() == (BATCH * costs.received).tolist()
    return {
        name: plan.unshard([result[name] for result in results], 2, keys=name in ("dk", "dv"))
        for name in ("out", "dq", "dk", "dv")
    }


def assert_dense(plan: Plan, mask: ua.masks.Mask, local_ranks: Pool) -> None:
    found, given = run(plan, local_ranks), tensors(plan)
    p = plan.problem
    truth = mask.dense(np.arange(p.q_len), np.arange(p.kv_len), ua.masks.Lengths(p.q_len, p.kv_len))
    visible = torch.from_numpy(truth[0])
    q, k, v = given["q"], given["k"], given["v"]
    expected = {"out": dense_attention(q, k, v, visible, p.scale)[0]}
    grads = dense_backward(given["do"], q, k, v, visible, p.scale)
    expected |= dict(zip(("dq", "dk", "dv"), grads, strict=True))
    for name, right in expected.items():
        error = torch.linalg.norm(found[name] - right) / torch.linalg.norm(right)
        assert float(error) <= 1e-10, name


@BOTH
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_relays(pass_: Pass, ranks: int, local_ranks: Pool) -> None:
    mask = ua.masks.causal()
    plan = base(mask, ranks=ranks)
    plan = with_program(plan, pass_, relay(plan, pass_))
    passed_on = [
        task
        for task in plan.pass_plan(pass_).program.task_views
        if task.kind == "transfer" and task.depends_on
        and plan.pass_plan(pass_).program.value_views[task.reads[0]].tensor is Tensor.K
    ]  # fmt: skip
    assert len(passed_on) == ranks * (ranks - 2)
    assert_dense(plan, mask, local_ranks)


@BOTH
def test_early_merges_on_a_relay(pass_: Pass, local_ranks: Pool) -> None:
    plan = base(ranks=4)
    plan = with_program(plan, pass_, early_merge(plan, pass_))
    assert_dense(plan, ua.masks.full(), local_ranks)


@BOTH
@pytest.mark.parametrize("join", [None, LocalOp.GATHER, LocalOp.PACK])
def test_stripes_of_rows_by_two_routes(
    pass_: Pass, join: LocalOp | None, local_ranks: Pool
) -> None:
    plan = base()
    plan = with_program(plan, pass_, stripes(plan, pass_, join))
    assert_dense(plan, ua.masks.full(), local_ranks)


@BOTH
def test_partial_results_in_row_ranges(pass_: Pass, local_ranks: Pool) -> None:
    plan = base()
    plan = with_program(plan, pass_, partial_stripes(plan, pass_))
    assert_dense(plan, ua.masks.full(), local_ranks)


@BOTH
def test_all_gather_and_reduce_scatter_of_gradients(pass_: Pass, local_ranks: Pool) -> None:
    mask = ua.masks.causal()
    plan = base(mask, ranks=4)
    plan = with_program(plan, pass_, all_gather(plan, pass_))
    assert_dense(plan, mask, local_ranks)


def test_reduce_scatter_of_outputs(local_ranks: Pool) -> None:
    plan = base()
    plan = with_program(plan, Pass.FORWARD, columns(plan))
    assert_dense(plan, ua.masks.full(), local_ranks)


@BOTH
def test_broadcasts(pass_: Pass, local_ranks: Pool) -> None:
    plan = base()
    plan = with_program(plan, pass_, broadcast(plan, pass_))
    assert_dense(plan, ua.masks.full(), local_ranks)


@BOTH
def test_head_parallel_by_all_to_all(pass_: Pass, local_ranks: Pool) -> None:
    """Its results come by message straight into the caller's tensors."""
    mask = ua.masks.sliding_window(9)
    plan = base(mask, ranks=2, head_groups=2)
    plan = with_program(plan, pass_, head_parallel(plan, pass_))
    assert_dense(plan, mask, local_ranks)


def test_casts(local_ranks: Pool) -> None:
    """A result that is widened before it travels is the same result, at more bytes."""
    plan = base(ranks=2)
    assert_dense(
        with_program(plan, Pass.FORWARD, cast(plan, wide=True)), ua.masks.full(), local_ranks
    )
    plan = base(ranks=2, dtype="bfloat16")
    narrow, wide = (
        with_program(plan, Pass.FORWARD, cast(plan, wide=wide)) for wide in (False, True)
    )
    assert wide.forward_account.sent[0] > narrow.forward_account.sent[0]
    found, expected = run(wide, local_ranks), run(narrow, local_ranks)
    assert torch.equal(found["out"], expected["out"])


@BOTH
def test_a_fill_is_the_identity_of_merging(pass_: Pass, local_ranks: Pool) -> None:
    """Rows 0 and 1 see nothing at all, besides."""
    mask = ua.masks.from_ranges([(2, 20)], [(1, 23)], ["full"])
    plan = base(mask, ranks=2)
    plan = with_program(plan, pass_, filled_elsewhere(plan, pass_))
    assert_dense(plan, mask, local_ranks)


def test_shared_buffers(local_ranks: Pool) -> None:
    mask = ua.masks.full()
    plan = base(mask, ranks=4)
    plan = with_program(plan, Pass.FORWARD, double_buffered(plan))
    buffers = plan.forward.program.values.buffer
    assert len(set(buffers[buffers >= 0].tolist())) < (buffers >= 0).sum()
    assert_dense(plan, mask, local_ranks)


def test_an_arrival_that_nothing_reads_is_taken_in(local_ranks: Pool) -> None:
    """A ring's useless keys: sent, counted, and in nobody's way, call after call."""
    mask = ua.masks.causal()
    plan = base(mask)
    hand = Hand(plan, Pass.FORWARD)
    held = {rank: {rank: hand.cols(rank)} for rank in range(3)}
    for rank in range(3):
        for chunk in range(3):
            if chunk != rank:
                (held[rank][chunk],) = hand.send(hand.cols(chunk), rank)
    hand.finish_rows([part for rank in range(3) for part in row_launch(hand, rank, held[rank])])
    plan = with_program(plan, Pass.FORWARD, hand.program())
    assert plan.forward_account.received[0] > base(mask).forward_account.received[0]
    for _ in range(2):
        assert_dense(plan, mask, local_ranks)
