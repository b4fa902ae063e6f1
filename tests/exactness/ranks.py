"""What a rank does for one case: attention forward and backward over its part of the sequence."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch

import ultraattn as ua
from ultraattn.masks import Mask
from ultraattn.plans import Plan
from ultraattn.runtime.pieces import DTYPES

MOST_BATCH = 3
"""Inputs are drawn for the largest batch, so that smaller ones are its first entries."""

Numbers = dict[str, np.ndarray]


@lru_cache(maxsize=2)
def inputs(
    lengths: tuple[int, int], heads: tuple[int, int], dims: tuple[int, int], dtype: str, batch: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key, value and the gradient of the output, whole; the same on every process."""
    generator = torch.Generator().manual_seed(lengths[0] * 31 + lengths[1])
    shapes = (
        (heads[0], lengths[0], dims[0]),
        (heads[1], lengths[1], dims[0]),
        (heads[1], lengths[1], dims[1]),
        (heads[0], lengths[0], dims[1]),
    )
    drawn = (
        torch.randn(MOST_BATCH, *shape, generator=generator, dtype=torch.float64)
        for shape in shapes
    )
    return tuple(x[:batch].to(DTYPES[dtype]) for x in drawn)


def inputs_of(plan: Plan, batch: int):
    """The inputs of a plan's problem."""
    p = plan.problem
    return inputs(
        (p.q_len, p.kv_len), (p.heads, p.kv_heads), (p.head_dim, p.value_dim), p.dtype, batch
    )


def shard_all(plan: Plan, rank: int, batch: int):
    """The rank's part of each of `inputs_of`."""
    q, k, v, dout = inputs_of(plan, batch)
    return (
        plan.shard(q, rank, dim=2),
        plan.shard(k, rank, dim=2, keys=True),
        plan.shard(v, rank, dim=2, keys=True),
        plan.shard(dout, rank, dim=2),
    )


def attend(
    rank: int, plan: Plan, mask: Mask | None, batches: Sequence[int]
) -> list[tuple[Numbers, list[int]]]:
    """For each size of batch, by one module: local results, and bytes (sent, received) of the
    forward and of the backward pass."""
    attention = ua.Attention(plan, mask=mask, timeout_s=120)
    return [_attend(attention, rank, plan, batch) for batch in batches]


def _attend(attention: ua.Attention, rank: int, plan: Plan, batch: int):
    q, k, v, dout = shard_all(plan, rank, batch)
    for x in (q, k, v):
        x.requires_grad_()
    counts = [(attention.bytes_sent, attention.bytes_received)]
    out, lse = attention(q, k, v, return_lse=True)
    counts.append((attention.bytes_sent, attention.bytes_received))
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    counts.append((attention.bytes_sent, attention.bytes_received))
    results = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    traffic = [after[way] - before[way] for before, after in pairwise(counts) for way in (0, 1)]
    return {name: packed(x) for name, x in results.items()}, traffic


def packed(x: torch.Tensor) -> np.ndarray:
    """A tensor as an array that can be sent between processes; bfloat16 as its bits."""
    x = x.detach().contiguous()
    return (x.view(torch.int16) if x.dtype == torch.bfloat16 else x).numpy()


def unpacked(x: np.ndarray) -> torch.Tensor:
    """The inverse of `packed`."""
    tensor = torch.from_numpy(x)
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.int16 else tensor
