"""How an Attention behaves as a module: calls, gradients, compile, checkpoints, groups, memory."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

import ultraattn as ua
from tests.exactness.ranks import inputs_of, unpacked
from tests.runtime import workers
from ultraattn import masks
from ultraattn.masks import Lengths
from ultraattn.plans.passes import Pass
from ultraattn.runtime.verify import Results, above, compare, dense_results, device_results, limit


def make_plan(mask=None, ranks=3, **changes) -> ua.Plan:
    options = {
        "seqlen": 41,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "dtype": "float64",
        "strategy": "rows",
    }
    return ua.plan(mask or masks.causal(), ranks=ranks, **{**options, **changes})


def visible_of(plan: ua.Plan, mask) -> torch.Tensor:
    p = plan.problem
    rows, cols = np.arange(p.q_len), np.arange(p.kv_len)
    return torch.tensor(mask.dense(rows, cols, Lengths(p.q_len, p.kv_len), heads=p.heads)[0])


def joined(plan: ua.Plan, parts) -> Results:
    """The whole results of every rank's part."""
    return Results(
        **{
            name: plan.unshard(
                [unpacked(part[name]) for part in parts], dim=2, keys=name in ("dk", "dv")
            )
            for name in ("out", "dq", "dk", "dv")
        }
    )


def assert_right(plan, parts, mask=None, batch=2, shift=0.0):
    """Results equal dense attention by the rule."""
    mask = mask or masks.causal()
    q, k, v, dout = inputs_of(plan, batch)
    q, k, v = (x + shift for x in (q, k, v))
    visible = visible_of(plan, mask)
    scale = plan.problem.scale
    truth = dense_results(q, k, v, dout, visible, scale)
    device = compare(device_results(q, k, v, dout, visible, scale), truth)
    assert not above(compare(joined(plan, parts), truth), limit(q.dtype, device))


@pytest.mark.parametrize("first_back", [0, 1])
def test_one_module_called_twice_then_backward_in_either_order(local_ranks, first_back):
    plan = make_plan()
    answers = local_ranks(3).run(workers.two_calls, plan, first_back)
    for call, shift in enumerate((0.0, 0.5)):
        assert_right(plan, [answer[call] for answer in answers], shift=shift)


def test_two_plans_of_other_shapes_interleaved(local_ranks):
    plans = [
        make_plan(),
        make_plan(masks.full(), seqlen=30, kv_seqlen=77, heads=2, kv_heads=1, head_dim=8),
    ]
    answers = local_ranks(3).run(workers.interleaved, plans)
    assert_right(plans[0], [answer[0] for answer in answers])
    assert_right(plans[1], [answer[1] for answer in answers], masks.full())


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(local_ranks, reentrant):
    plan = make_plan()
    assert_right(plan, local_ranks(3).run(workers.checkpointed, plan, reentrant))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_as_one_graph(local_ranks, backend):
    plan = make_plan(ranks=2)
    assert_right(plan, local_ranks(2).run(workers.compiled, plan, backend))


def test_operators_pass_the_checks_of_torch(local_ranks):
    plan = make_plan(ranks=1, seqlen=9)
    (checks,) = local_ranks(1).run(workers.operator_checks, plan)
    assert len(checks) >= 6
    assert set(checks.values()) == {"SUCCESS"}


def test_a_module_lives_until_its_backward_pass(local_ranks):
    plan = make_plan()
    assert_right(plan, local_ranks(3).run(workers.dropped_module, plan))


def test_no_grad_and_inference_mode(local_ranks):
    assert (
        local_ranks(2).run(workers.without_grad, make_plan(ranks=2)) == [(False, False, True)] * 2
    )


@pytest.mark.parametrize("with_out", [False, True])
def test_gradient_of_the_lse(local_ranks, with_out):
    plan = make_plan(masks.document([20, 21]), ranks=3)
    q, k, v, dout = inputs_of(plan, 2)
    dlse = torch.linspace(-1, 1, 2 * 4 * 41, dtype=torch.float64).view(2, 4, 41)
    parts = local_ranks(3).run(workers.lse_gradient, plan, dlse.numpy(), with_out)
    # d(LSE_i)/d(q_i) = scale * softmax(scores_i) K, by torch's autograd on the formula.
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    scores = plan.problem.scale * q @ k.repeat_interleave(2, dim=1).mT
    scores = scores.masked_fill(~visible_of(plan, masks.document([20, 21])), float("-inf"))
    lse = scores.logsumexp(-1)
    out = scores.softmax(-1) @ v.repeat_interleave(2, dim=1)
    loss = (lse * dlse).sum() + (out * dout).sum() * with_out
    grads = torch.autograd.grad(loss, (q, k, v), allow_unused=True)
    for name, true in zip(("dq", "dk", "dv"), grads, strict=True):
        found = plan.unshard(
            [unpacked(part[name]) for part in parts], dim=2, keys=name in ("dk", "dv")
        )
        torch.testing.assert_close(found, torch.zeros_like(found) if true is None else true)


def test_a_scale_that_is_not_the_default(local_ranks):
    plan = make_plan(scale=0.9)
    assert_right(plan, local_ranks(3).run(workers.once, plan, 2))


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_strided_inputs_and_gradients(local_ranks, dtype):
    plan = make_plan(dtype=dtype)
    assert_right(plan, local_ranks(3).run(workers.strided, plan))


def test_a_gradient_of_stride_zero(local_ranks):
    plan = make_plan(ranks=2)
    found = joined(plan, local_ranks(2).run(workers.expanded_gradient, plan))
    q, k, v, dout = inputs_of(plan, 2)
    truth = dense_results(q, k, v, torch.ones_like(dout), visible_of(plan, masks.causal()))
    assert not above(compare(found, truth), limit(torch.float64, compare(truth, truth)))


@pytest.mark.parametrize("batch", [1, 3])
def test_any_batch(local_ranks, batch):
    plan = make_plan(ranks=2)
    assert_right(plan, local_ranks(2).run(workers.once, plan, batch), batch=batch)


def test_an_empty_batch(local_ranks):
    plan = make_plan(ranks=2)
    parts = local_ranks(2).run(workers.once, plan, 0)
    assert joined(plan, parts).dq.shape == (0, 4, 41, 16)


@pytest.mark.parametrize("dims", [(16, 8), (8, 24), (5, 3)])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_values_of_another_width(local_ranks, dims, dtype):
    plan = make_plan(head_dim=dims[0], value_dim=dims[1], dtype=dtype)
    assert_right(plan, local_ranks(3).run(workers.once, plan, 2))


@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (5, 5), (7, 1)])
def test_head_counts(local_ranks, heads):
    plan = make_plan(heads=heads[0], kv_heads=heads[1])
    assert_right(plan, local_ranks(3).run(workers.once, plan, 2))


@pytest.mark.parametrize("kernel", ["reference", "torch_cpu"])
def test_a_kernel_by_name(local_ranks, kernel):
    plan = make_plan(ranks=2)
    assert_right(plan, local_ranks(2).run(workers.once, plan, 2, {"kernel": kernel}))


REFUSALS = {
    "unknown": "tau",
    "dropout_p": "dropout is not supported",
    "attn_mask": "the mask belongs to the plan",
    "bias": "additive biases are not supported",
    "sinks": "attention sinks are not supported",
    "scale": "the scale belongs to the plan",
    "is_causal": "the mask belongs to the plan",
    "query shape": "the plan expects",
    "query heads": "the plan expects",
    "key shape": "the plan expects",
    "value width": "the plan expects",
    "three axes": "the plan expects",
    "key batch": "expected one batch",
    "dtype": "the plan is for float64",
    "value dtype": "the plan is for float64",
    "device": "on device meta",
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_served_is_refused_and_the_next_call_works(local_ranks, case):
    answers = local_ranks(2).run(workers.refused, make_plan(ranks=2), case)
    assert all(REFUSALS[case] in answer for answer in answers), answers


def test_a_plan_for_another_number_of_ranks(local_ranks):
    answers = local_ranks(3).run(workers.constructed, make_plan(ranks=2), {})
    assert all("plan for 2 ranks, process group of 3" in answer for answer in answers), answers


def test_an_unknown_kernel(local_ranks):
    (answer, _) = local_ranks(2).run(workers.constructed, make_plan(ranks=2), {"kernel": "magic"})
    assert answer.startswith("InputError: kernel 'magic'")
    assert "reference" in answer


def test_no_process_group():
    with pytest.raises(ua.InputError, match="init_process_group"):
        ua.Attention(make_plan(ranks=1))


def test_ranks_that_hold_different_plans_all_fail_naming_both(local_ranks):
    one, other = make_plan(), make_plan(masks.full())
    answers = local_ranks(3).run(workers.differing, [one, other, one])
    for answer in answers:
        assert answer.startswith("RunError")
        assert one.digest in answer
        assert other.digest in answer
    assert_right(one, local_ranks(3).run(workers.once, one, 2))  # the group is as good as before


def every_third(batch, head, q_index, kv_index):
    return (q_index - kv_index) % 3 == 0


def test_a_python_mask_is_handed_over_again(local_ranks):
    mask = masks.from_mask_mod(every_third)
    plan = make_plan(mask)
    assert_right(plan, local_ranks(3).run(workers.once, plan, 2, {"mask": mask}), mask)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "hand it over again"),
        ({"mask": masks.causal()}, "grid digest"),
    ],
)
def test_a_python_mask_that_is_missing_or_another(local_ranks, options, message):
    plan = make_plan(masks.from_mask_mod(every_third), ranks=2)
    answers = local_ranks(2).run(workers.constructed, plan, options)
    assert all(message in answer for answer in answers), answers


@pytest.mark.parametrize("source", [0, 2])
def test_share_gives_every_rank_the_plan_of_one(local_ranks, source):
    plan = make_plan()
    answers = local_ranks(3).run(workers.shared, plan, source)
    assert [answer[:2] for answer in answers] == [(True, plan.digest)] * 3
    assert_right(plan, [answer[2] for answer in answers], batch=1)


def test_share_without_a_plan_fails_on_every_rank(local_ranks):
    answers = local_ranks(3).run(workers.shared, None, 1)
    assert all("rank 1 shared no plan" in answer for answer in answers), answers


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_runs_are_bit_equal(local_ranks, dtype):
    plan = make_plan(masks.strided(), ranks=4, seqlen=130, dtype=dtype)
    one, two = (local_ranks(4).run(workers.once, plan, 2) for _ in range(2))
    for first, second in zip(one, two, strict=True):
        assert all(np.array_equal(first[name], second[name]) for name in first)


def test_a_device_mesh_of_one_dimension(local_ranks):
    plan = make_plan()
    assert_right(plan, local_ranks(3).run(workers.on_mesh, plan, (3,)))


def test_a_device_mesh_of_two_dimensions_is_refused(local_ranks):
    answers = local_ranks(4).run(workers.on_mesh, make_plan(ranks=4), (2, 2))
    assert all("device mesh of 2 dimensions" in answer for answer in answers), answers


def test_each_slice_of_a_mesh_has_an_attention_of_its_own(local_ranks):
    plan = make_plan(ranks=2)
    answers = local_ranks(4).run(workers.on_mesh_slice, plan)
    assert_right(plan, answers[:2])
    assert_right(plan, answers[2:])


def test_the_workspace_does_not_grow_and_lends_nothing_between_calls(local_ranks):
    for held, lent in local_ranks(3).run(workers.many_calls, make_plan(), 200):
        assert held[0] == held[1] > 0
        assert lent == 0


def test_the_workspace_lets_go_of_what_a_plan_that_is_gone_had(local_ranks):
    big, small = make_plan(seqlen=1200), make_plan()
    for held_big, held_small in local_ranks(3).run(workers.one_after_another, big, small):
        assert 0 < held_small < held_big / 10


def test_a_dispatch_mode_sees_the_operators(local_ranks):
    for names, same in local_ranks(3).run(workers.seen_by_a_mode, make_plan()):
        assert names == ["ultraattn::attention", "ultraattn::attention_backward"]
        assert same


def test_tasks_run_in_the_order_of_the_plan(local_ranks):
    plan = make_plan(masks.streaming(), ranks=4, seqlen=64)
    for rank, ran in enumerate(local_ranks(4).run(workers.traced, plan)):
        local = plan.for_rank(rank)
        expected = [
            (str(pass_), task.index)
            for pass_, program in ((Pass.FORWARD, local.forward), (Pass.BACKWARD, local.backward))
            for task in program.tasks
        ]
        assert ran == expected


@pytest.mark.parametrize("chunks", [4, 16, 64])
def test_the_error_does_not_grow_with_the_number_of_merges(local_ranks, chunks):
    """Key chunks multiply the partial results; each is rounded to 16 bits at most once."""
    plan = make_plan(masks.full(), ranks=4, seqlen=256, chunks=chunks, dtype="bfloat16")
    found = joined(plan, local_ranks(4).run(workers.once, plan, 2))
    q, k, v, dout = inputs_of(plan, 2)
    truth = dense_results(q, k, v, dout)
    errors = compare(found, truth).norm
    alone = compare(device_results(q, k, v, dout), truth).norm
    # Two roundings of independent parts against one: at most sqrt(2), and a margin for luck.
    assert errors["out"] <= 1.5 * alone["out"] + torch.finfo(torch.bfloat16).eps / 4


def test_large_logits_do_not_overflow(local_ranks):
    plan = make_plan(scale=60.0, ranks=4)
    assert_right(plan, local_ranks(4).run(workers.once, plan, 2))


def test_an_unsound_plan_fails_on_every_rank(local_ranks) -> None:
    """An instant plan is not checked when it is made, so it is before it runs."""
    plan = make_plan(ranks=2, effort="instant")
    problem = dataclasses.replace(plan.problem, visible_pairs=plan.problem.visible_pairs + 1)
    lost = dataclasses.replace(plan, problem=problem)  # As if a block had been lost.
    results = local_ranks(2).attempt(workers.once, lost, 1)
    assert [result.kind for result in results] == ["PlanError", "PlanError"]
