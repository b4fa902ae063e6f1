"""What the ranks of tests/gpu/test_attention.py do, each in a process with a GPU of its own."""

import faulthandler
import os
import random
import time

import pytest
import torch
import torch.distributed as dist

import ultraattn as ua
from tests.gpu.cases import draw, error, truth, visible
from ultraattn.cluster import Cluster
from ultraattn.runtime import graphs

TOKENS = 1100
LIMIT_S = 90
"""A rank that takes longer shows where it stands, and leaves."""
MASKS = {
    "causal": ua.masks.causal(),
    "strided": ua.masks.strided(),
    "document": ua.masks.document([137, 450, 89, 424]),
}


def start(rank, ranks, port, worker, args):
    """Joins the group, works, leaves."""
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    graphs.MOVING_AFTER = 1  # so that a few calls run task by task, with copies, and without
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    shared = torch.cuda.device_count() < ranks
    if shared:  # all ranks on one GPU: symmetric memory allows it, NCCL does not
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    torch.cuda.set_device(0 if shared else rank)
    dist.init_process_group(
        "gloo" if shared else "nccl",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=ranks,
    )
    globals()[worker](rank, ranks, *args)
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


def _plan(mask, ranks, heads, kv_heads, dim, tokens=TOKENS, keep=False):
    return ua.plan(
        mask, seqlen=tokens, heads=heads, kv_heads=kv_heads, head_dim=dim,
        cluster=Cluster.load("h200").resize(gpus_per_node=ranks), effort="instant",
        keep_received=keep,
    )  # fmt: skip


def _inputs(plan, rank, seed):
    p = plan.problem
    whole = [
        draw(seed + i, 1, heads, p.q_len, p.head_dim)
        for i, heads in enumerate((p.heads, p.kv_heads, p.kv_heads, p.heads))
    ]
    local = [plan.shard(x, rank, dim=2) for x in whole]
    return whole, local


def exact(rank, ranks, transport, graph, keep=False):
    """Out and gradients; twice forward then twice backward in both orders; LSE gradients."""
    for name, mask in MASKS.items():
        for heads, kv_heads, dim in ((8, 8, 64), (8, 2, 128)):
            plan = _plan(mask, ranks, heads, kv_heads, dim, keep=keep)
            assert plan.kept_bytes.any() == keep
            attention = ua.Attention(plan, transport=transport, graph=graph, timeout_s=60)
            sets = []
            for seed in (0, 10):
                whole, local = _inputs(plan, rank, seed)
                sets.append((truth(*whole, visible(mask, TOKENS, TOKENS)), local))
            for order in ((0, 1), (1, 0)):
                calls = []
                for _, (q, k, v, _) in sets:
                    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
                    calls.append((leaves, attention(*leaves)))
                for index in order:
                    true, local = sets[index]
                    leaves, out = calls[index]
                    grads = torch.autograd.grad(out, leaves, local[3])
                    for what, got, wanted in zip(
                        ("out", "dq", "dk", "dv"), (out, *grads), true, strict=True
                    ):
                        found = error(got, plan.shard(wanted, rank, dim=2))
                        assert found < 8e-3, (name, heads, dim, what, found)
    lse_gradient(rank, ranks, transport, graph)


def lse_gradient(rank, ranks, transport, graph):
    """The LSE as a differentiable output, and rows whose output has no gradient."""
    plan = _plan(MASKS["causal"], ranks, 4, 4, 64)
    attention = ua.Attention(plan, transport=transport, graph=graph, timeout_s=60)
    (q, k, v, _), local = _inputs(plan, rank, 30)
    leaves = [x.detach().requires_grad_() for x in local[:3]]
    _, lse = attention(*leaves, return_lse=True)
    got = torch.autograd.grad(lse.sum(), leaves)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    scores = wide[0] @ wide[1].mT * plan.problem.scale
    scores = scores.masked_fill(~visible(MASKS["causal"], TOKENS, TOKENS), float("-inf"))
    true = torch.autograd.grad(scores.logsumexp(-1).sum(), wide[:2])
    for some, wanted in zip(got, true, strict=False):
        assert error(some, plan.shard(wanted, rank, dim=2)) < 8e-3
    assert float(got[2].abs().max()) < 2e-2


def replays(rank, ranks, transport, graph, count):
    """Calls with random delays on the device and on the host: every one gives the same bits."""
    plan = _plan(MASKS["causal"], ranks, 8, 8, 64)
    attention = ua.Attention(plan, transport=transport, graph=graph, timeout_s=60)
    _, (q, k, v, _) = _inputs(plan, rank, 0)
    first = attention(q, k, v).clone()
    generator = random.Random(rank)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(count):
        if generator.random() < 0.3:
            torch.cuda._sleep(generator.randrange(1, 400_000))
        wrong += (attention(q, k, v) != first).any()
    assert int(wrong) == 0


def deterministic(rank, ranks, transport, graph, count):
    """deterministic=True: out and gradients are bit-equal in every call of every module."""
    for name, heads, kv_heads in (("causal", 8, 2), ("document", 4, 4)):
        plan = _plan(MASKS[name], ranks, heads, kv_heads, 128)
        _, (q, k, v, dout) = _inputs(plan, rank, 0)
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        generator, first = random.Random(rank), None
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(2):
            attention = ua.Attention(
                plan, transport=transport, graph=graph, timeout_s=60, deterministic=True
            )
            for _ in range(count):
                if generator.random() < 0.3:
                    torch.cuda._sleep(generator.randrange(1, 400_000))
                out = attention(*leaves)
                got = (out.detach(), *torch.autograd.grad(out, leaves, dout))
                first = [x.clone() for x in got] if first is None else first
                for a, b in zip(got, first, strict=True):
                    wrong += (a != b).any()
        assert int(wrong) == 0, name


def apart(rank, ranks, transport, graph):
    """One rank's tensors stay where they are, the other's never do: each has graphs of its own."""
    plan = _plan(MASKS["causal"], ranks, 8, 2, 128)
    attention = ua.Attention(plan, transport=transport, graph=graph, timeout_s=15)
    _, (q, k, v, dout) = _inputs(plan, rank, 0)
    leaves, first, kept = [x.detach().requires_grad_() for x in (q, k, v)], None, []
    for _ in range(12):
        if rank == 1:
            leaves = [x.detach().clone().requires_grad_() for x in leaves]
        out = attention(*leaves)
        got = (out.detach(), *torch.autograd.grad(out, leaves, dout))
        if rank == 1:
            kept.append((out, leaves, got))
        first = [x.clone() for x in got] if first is None else first
        assert all(error(a, b) < 8e-3 for a, b in zip(got, first, strict=True))
        del out, got


def shapes(rank, ranks, transport, graph):
    """Lengths that divide and that do not, head_dims, head counts, batches: against float64."""
    for tokens, heads, kv_heads, dim, batch in (
        (1024, 32, 32, 64, 1),
        (1031, 32, 8, 96, 1),
        (1031, 8, 1, 128, 2),
        (2, 4, 4, 64, 1),
        (777, 4, 2, 96, 3),
    ):
        mask = MASKS["causal"]
        plan = _plan(mask, ranks, heads, kv_heads, dim, tokens)
        attention = ua.Attention(plan, transport=transport, graph=graph, timeout_s=60)
        whole = [
            draw(i, batch, some, tokens, dim) for i, some in enumerate((heads, kv_heads, kv_heads))
        ]
        whole.append(draw(9, batch, heads, tokens, dim))
        true = truth(*whole, visible(mask, tokens, tokens))
        leaves = [plan.shard(x, rank, dim=2).detach().requires_grad_() for x in whole[:3]]
        for _ in range(6):  # the last ones by graphs of their own
            out = attention(*leaves)
            grads = torch.autograd.grad(out, leaves, plan.shard(whole[3], rank, dim=2))
        for what, got, wanted in zip(("out", "dq", "dk", "dv"), (out, *grads), true, strict=True):
            found = error(got, plan.shard(wanted, rank, dim=2))
            assert found < 8e-3, (tokens, heads, dim, batch, what, found)


def checkpointed(rank, ranks, transport, graph):
    """Two layers under activation checkpointing give the gradients of two layers without."""
    from torch.utils.checkpoint import checkpoint

    plan = _plan(MASKS["causal"], ranks, 8, 8, 64)
    attention = ua.Attention(plan, transport=transport, graph=graph, timeout_s=60)
    _, (q, k, v, dout) = _inputs(plan, rank, 0)

    def layers(wrap):
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        hidden = leaves[0]
        for _ in range(2):
            hidden = hidden + wrap(attention, hidden, leaves[1], leaves[2])
        return hidden.detach(), *torch.autograd.grad(hidden, leaves, dout)

    plain = layers(lambda layer, *inputs: layer(*inputs))
    for _ in range(4):
        for got, wanted in zip(
            layers(lambda layer, *inputs: checkpoint(layer, *inputs, use_reentrant=False)),
            plain, strict=True,
        ):  # fmt: skip
            assert error(got, wanted) < 4e-3


def memory(rank, ranks, transport, graph, count):
    """Many calls, forward and backward, take no more memory than the first few."""
    plan = _plan(MASKS["causal"], ranks, 8, 8, 64)
    attention = ua.Attention(plan, transport=transport, graph=graph, timeout_s=60)
    _, (q, k, v, dout) = _inputs(plan, rank, 0)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    held = []
    for index in range(count):
        torch.autograd.grad(attention(*leaves), leaves, dout)
        if index in (20, count - 1):
            torch.cuda.synchronize()
            free, _ = torch.cuda.mem_get_info()
            held.append((torch.cuda.memory_allocated(), free))
    assert held[0][0] == held[1][0]
    assert held[0][1] - held[1][1] < 8 << 20


def stops(rank, ranks, transport, graph):
    """A rank that makes no further calls is named with what it owes; nothing hangs."""
    plan = _plan(MASKS["causal"], ranks, 4, 4, 64)
    attention = ua.Attention(plan, transport=transport, graph=graph, timeout_s=3)
    _, (q, k, v, _) = _inputs(plan, rank, 0)
    for _ in range(5):
        attention(q, k, v)
    torch.cuda.synchronize()
    dist.barrier()
    if rank == 1:
        time.sleep(14)  # alive, and makes no call
        os._exit(0)  # its group is broken; leaving it in order would wait for rank 0
    for _ in range(3):
        attention(q, k, v)
    start = time.monotonic()
    torch.cuda.synchronize()
    assert time.monotonic() - start < 12
    with pytest.raises(ua.RunError, match="rank 1 is alive and owes rank 0 forward task"):
        attention(q, k, v)
    os._exit(0)


def copies(rank, ranks):
    """Graphs hold no tensors of a caller who comes back with the same; they do for others."""
    graphs.MOVING_AFTER = 4
    plan = _plan(MASKS["causal"], ranks, 8, 8, 128, tokens=8192)
    attention = ua.Attention(plan, graph=True, timeout_s=60)
    _, (q, k, v, _) = _inputs(plan, rank, 0)
    first = attention(q, k, v).clone()
    before = torch.cuda.memory_allocated()
    for _ in range(12):
        attention(q, k, v)
    held = torch.cuda.memory_allocated() - before
    assert held < 2**23, held
    kept = []
    for _ in range(12):
        moved = [x.clone() for x in (q, k, v)]
        kept.append(moved)
        assert torch.equal(attention(*moved), first)
