"""Backward reads again what forward received: exact, with the traffic that the plan says."""

import dataclasses

import pytest
import torch

import ultraattn as ua
from tests.plans.samples import scattered, small
from tests.runtime import workers
from tests.runtime.test_attention_behaviour import assert_right, make_plan
from tests.runtime.test_together import DIM, HEADS, MASKS, TOKENS, error, visible
from ultraattn.errors import PlanError
from ultraattn.planning.graph import build_program
from ultraattn.planning.keeping import held_after
from ultraattn.plans import Pass, Plan, Tensor
from ultraattn.plans.storage import dumps, loads
from ultraattn.runtime.dense import dense_attention, dense_backward
from ultraattn.runtime.together import Together


def keeping(plan: Plan) -> Plan:
    """The plan with the blocks of its backward pass where they are, and all that can be kept."""
    layouts, old = (plan.q_layout, plan.kv_layout), plan.backward.program
    program = build_program(
        Pass.BACKWARD, plan.problem, *layouts, plan.place.node_of, old.block_views,
        old.rank_of_block.tolist(), held_after(plan.forward.program, *layouts),
    )  # fmt: skip
    made = dataclasses.replace(plan, backward=dataclasses.replace(plan.backward, program=program))
    assert made.kept_bytes.max() > 0
    return made


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(("ranks", "kv_heads", "head_groups"), [(2, 2, 1), (3, 4, 2), (4, 1, 4)])
def test_results_equal_dense_attention_and_traffic_is_the_plans(mask, ranks, kv_heads, head_groups):
    options = {
        "seqlen": TOKENS, "heads": HEADS, "kv_heads": kv_heads, "head_dim": DIM, "ranks": ranks,
        "strategy": "tile", "effort": "fast", "head_groups": head_groups,
    }  # fmt: skip
    again = scattered(small(mask, **options))
    plan = keeping(again)
    plan.check()
    generator = torch.Generator().manual_seed(ranks)
    q, k, v, dout = (
        torch.randn(2, heads, TOKENS, DIM, dtype=torch.float64, generator=generator)
        for heads in (HEADS, kv_heads, kv_heads, HEADS)
    )
    run = Together(plan)
    out, lse = run.forward(q, k, v)
    before = [session.transport.bytes_sent for session in run.sessions]
    grads = run.backward(dout, q, k, v, out, lse)
    sent = [session.transport.bytes_sent for session in run.sessions]
    moved = [a - b for a, b in zip(sent, before, strict=True)]
    assert moved == (2 * plan.backward_account.sent).tolist()
    saved = again.backward_account.received - plan.backward_account.received
    assert saved.tolist() == plan.kept_bytes.tolist()
    seen = visible(mask)
    assert error(out, dense_attention(q, k, v, seen)[0]) < 1e-12
    for got, wanted in zip(grads, dense_backward(dout, q, k, v, seen), strict=True):
        assert error(got, wanted) < 1e-12


@pytest.fixture(scope="module")
def plan() -> Plan:
    return keeping(scattered(make_plan()))


@pytest.mark.parametrize("first_back", [0, 1])
def test_each_of_two_calls_keeps_its_own(local_ranks, plan, first_back):
    answers = local_ranks(3).run(workers.two_calls, plan, first_back)
    for call, shift in enumerate((0.0, 0.5)):
        assert_right(plan, [answer[call] for answer in answers], shift=shift)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(local_ranks, plan, reentrant):
    assert_right(plan, local_ranks(3).run(workers.checkpointed, plan, reentrant))


def test_compiles_as_one_graph(local_ranks, plan):
    assert_right(plan, local_ranks(3).run(workers.compiled, plan, "aot_eager"))


def test_no_grad_keeps_nothing(local_ranks, plan):
    found = local_ranks(3).run(workers.kept_elements, plan)
    elements = (2 * plan.kept_bytes // 8).tolist()
    assert found == [(elements[rank], 0) for rank in range(3)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_other_dtypes(local_ranks, dtype):
    made = keeping(scattered(make_plan(dtype=dtype)))
    assert_right(made, local_ranks(3).run(workers.once, made, 2))


def test_planned_by_name(local_ranks):
    again = make_plan()
    made = make_plan(keep_received=True)
    assert made.forward == again.forward
    assert made.kept_bytes.max() > 0
    assert made.backward_account.sent.sum() < again.backward_account.sent.sum()
    assert made.backward.predicted_ns < again.backward.predicted_ns
    assert "kept from forward to backward" in made.summary()
    assert_right(made, local_ranks(3).run(workers.once, made, 2))


def test_never_slower_than_sending_again():
    options = {"seqlen": 4096, "heads": 8, "kv_heads": 2, "head_dim": 64, "ranks": 4}
    for mask in (ua.masks.causal(), ua.masks.star(), ua.masks.sliding_window(300)):
        for strategy in ("tile", "zigzag", "auto"):
            both = [
                ua.plan(mask, strategy=strategy, effort="fast", keep_received=keep, **options)
                for keep in (False, True)
            ]
            again, kept = (made.backward.predicted_ns for made in both)
            assert kept <= again


def test_nothing_to_keep_is_said():
    plan = make_plan(ranks=1, keep_received=True)
    assert not plan.kept_bytes.any()
    assert any("keeps nothing" in note for note in plan.backward.notes)


def test_a_saved_plan_keeps_the_same(plan):
    read = loads(dumps(plan))
    assert read == plan
    assert read.kept_bytes.tolist() == plan.kept_bytes.tolist()


def test_what_forward_did_not_bring_is_refused(plan):
    rows = make_plan()
    with pytest.raises(PlanError, match="no input that the rank owns or keeps from forward"):
        dataclasses.replace(plan, forward=rows.forward).check()


def test_only_inputs_of_both_passes_are_kept(plan):
    values = plan.backward.program.value_views
    kept = {
        values[number].tensor for rank in range(3) for number in plan.for_rank(rank).kept.numbers
    }
    assert kept == {Tensor.Q, Tensor.K, Tensor.V}
