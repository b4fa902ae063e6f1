"""Whole plans in one process: exact on the CPU at every number of ranks, and faults are named."""

import pytest
import torch

import ultraattn as ua
from ultraattn.errors import RunError
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
