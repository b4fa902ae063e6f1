"""Runs one attention, forward and backward, over the processes that torchrun starts.

torchrun --nproc-per-node 2 examples/attention.py
"""

import torch
import torch.distributed as dist

import ultraattn as ua

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()

# Rank 0 plans, all receive the bytes of its plan.
plan = None
if rank == 0:
    mask = ua.masks.causal() & ua.masks.sliding_window(200)
    plan = ua.plan(
        mask, seqlen=1000, heads=8, kv_heads=2, head_dim=64, dtype="float32", ranks=ranks
    )
plan = ua.share(plan)

# Each rank holds its own tokens: (batch, heads, local tokens, head_dim), as SDPA takes them.
torch.manual_seed(0)
q, k, v = (torch.randn(1, heads, 1000, 64) for heads in (8, 2, 2))
query, key, value = (plan.shard(x, rank, dim=2).requires_grad_() for x in (q, k, v))

attention = ua.Attention(plan)
out = attention(query, key, value)
out.square().sum().backward()

assert query.grad is not None
print(
    f"rank {rank}: out {tuple(out.shape)}, dq {tuple(query.grad.shape)}, "
    f"sent {attention.bytes_sent:,} bytes"
)
dist.destroy_process_group()
