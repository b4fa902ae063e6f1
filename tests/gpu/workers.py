"""What the ranks of tests/gpu/test_attention.py do, each in a process with a GPU of its own."""

import faulthandler
import os
import random

import torch
import torch.distributed as dist

import ultraattn as ua
from tests.gpu.cases import draw, error, truth, visible
from ultraattn.cluster import Cluster

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
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks
    )
    globals()[worker](rank, ranks, *args)
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


def _plan(mask, ranks, heads, kv_heads, dim):
    return ua.plan(
        mask, seqlen=TOKENS, heads=heads, kv_heads=kv_heads, head_dim=dim,
        cluster=Cluster.load("h200").resize(gpus_per_node=ranks), effort="instant",
    )  # fmt: skip


def _inputs(plan, rank, seed):
    p = plan.problem
    whole = [
        draw(seed + i, 1, heads, TOKENS, p.head_dim)
        for i, heads in enumerate((p.heads, p.kv_heads, p.kv_heads, p.heads))
    ]
    local = [plan.shard(x, rank, dim=2) for x in whole]
    return whole, local


def exact(rank, ranks, transport, graph):
    """Out and gradients; twice forward then twice backward in both orders; LSE gradients."""
    for name, mask in MASKS.items():
        for heads, kv_heads, dim in ((8, 8, 64), (8, 2, 128)):
            plan = _plan(mask, ranks, heads, kv_heads, dim)
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
