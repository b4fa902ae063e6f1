"""Whole plans in one process: exact on the CPU at every number of ranks, and faults are named."""

import pytest
import torch

import ultraattn as ua
from tests.plans.samples import assigned, small
from ultraattn.errors import RunError
from ultraattn.runtime import tiles
from ultraattn.runtime.dense import dense_attention, dense_backward
from ultraattn.runtime.together import Together
from ultraattn.runtime.transports.loopback import Loopback

MASKS = [ua.masks.causal(), ua.masks.strided(grid=8, period=2, width=2), ua.masks.document([9, 30])]
TOKENS, HEADS, DIM = 39, 4, 8


def visible(mask):
    positions = torch.arange(TOKENS).numpy()
    from ultraattn.masks import Lengths

    return torch.from_numpy(mask.dense(positions, positions, Lengths(TOKENS, TOKENS))[0])


def error(got, expected):
    return float((got.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(("ranks", "kv_heads"), [(1, 4), (2, 2), (3, 4), (4, 1)])
def test_a_plan_in_one_process_equals_dense_attention(mask, ranks, kv_heads):
    plan = ua.plan(
        mask, seqlen=TOKENS, heads=HEADS, kv_heads=kv_heads, head_dim=DIM, dtype="float64",
        ranks=ranks, effort="fast",
    )  # fmt: skip
    generator = torch.Generator().manual_seed(ranks)
    q, k, v, dout = (
        torch.randn(2, heads, TOKENS, DIM, dtype=torch.float64, generator=generator)
        for heads in (HEADS, kv_heads, kv_heads, HEADS)
    )
    run = Together(plan)
    for _ in range(2):
        out, lse = run.forward(q, k, v)
        grads = run.backward(dout, q, k, v, out, lse)
    seen = visible(mask)
    expected, expected_lse = dense_attention(q, k, v, seen)
    assert error(out, expected) < 1e-12
    assert torch.allclose(lse, expected_lse)
    for got, wanted in zip(grads, dense_backward(dout, q, k, v, seen), strict=True):
        assert error(got, wanted) < 1e-12


def test_bytes_that_ranks_send_are_those_of_the_plan():
    plan = ua.plan(
        ua.masks.causal(), seqlen=TOKENS, heads=HEADS, head_dim=DIM, dtype="float32", ranks=3,
        effort="fast",
    )  # fmt: skip
    run = Together(plan)
    run.forward(*(torch.randn(1, HEADS, TOKENS, DIM) for _ in range(3)))
    sent = [session.transport.bytes_sent for session in run.sessions]
    received = [session.transport.bytes_received for session in run.sessions]
    assert sent == plan.forward_account.sent.tolist()
    assert sum(received) == sum(sent)


def test_a_rank_that_fails_is_named_and_the_others_do_not_hang(monkeypatch):
    plan = ua.plan(
        ua.masks.causal(), seqlen=TOKENS, heads=HEADS, head_dim=DIM, dtype="float32", ranks=3,
        effort="fast",
    )  # fmt: skip
    run = Together(plan, timeout_s=30.0)

    def broken(*args, **kwargs):
        raise ValueError("a fault of rank 1")

    monkeypatch.setattr(run._tiles[1], "run", broken)
    with pytest.raises(RunError, match="a fault of rank 1"):
        run.forward(*(torch.randn(1, HEADS, TOKENS, DIM) for _ in range(3)))
    with pytest.raises(RunError, match="failed in an earlier call"):
        run.forward(*(torch.randn(1, HEADS, TOKENS, DIM) for _ in range(3)))


def test_a_message_that_nobody_sends_runs_out_of_time():
    links = Loopback(2)
    handle = links.transport(1).receive(0, torch.empty(4, dtype=torch.uint8), 7)
    with pytest.raises(RuntimeError, match="no message 7 from rank 0 to rank 1"):
        handle.wait(0.1)


def test_head_ranges_that_touch_and_look_at_the_same_keys_are_one_call(monkeypatch):
    calls = []

    def counted(name, real):
        return lambda *args, **options: calls.append(name) or real(*args, **options)

    for name in ("forward_row", "backward_row"):
        monkeypatch.setattr(tiles, name, counted(name, getattr(tiles, name)))
    found = {}
    for groups in (1, 4):
        plan = small(
            ua.masks.full(), heads=4, kv_heads=2, ranks=2, head_groups=groups, strategy="tile",
            effort="instant",
        )  # fmt: skip
        plan = assigned(plan, lambda block: block.q_chunk % 2)
        blocks = plan.forward.program.block_views
        assert {b.head_stop - b.head_start for b in blocks} == {4 // groups}
        random = torch.Generator().manual_seed(3)
        q, dout, k, v = (
            torch.randn(1, heads, plan.problem.q_len, 4, dtype=torch.float64, generator=random)
            for heads in (4, 4, 2, 2)
        )
        together = Together(plan)
        out, lse = together.forward(q, k, v)
        grads = together.backward(dout, q, k, v, out, lse)
        found[groups] = sorted(calls), (out, lse, *grads)
        calls.clear()
    assert found[4][0] == found[1][0]
    for one, other in zip(found[1][1], found[4][1], strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)
