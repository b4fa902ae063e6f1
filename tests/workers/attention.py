"""Runs a plan forward and backward on one rank; ranks import it in processes of their own."""

from __future__ import annotations

import itertools
from typing import Any


def attend(rank: int, plan: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """Local results, and (sent, received) bytes of the forward and of the backward pass."""
    import torch

    import ultraattn as ua

    attention = ua.Attention(plan, timeout_s=60)

    def local(name: str) -> torch.Tensor:
        x = plan.shard(tensors[name], rank, dim=2, keys=name in ("k", "v"))
        return x.clone().requires_grad_(name != "do")

    q, k, v, do = (local(name) for name in ("q", "k", "v", "do"))
    counts = [(attention.bytes_sent, attention.bytes_received)]
    out = attention(q, k, v)
    counts.append((attention.bytes_sent, attention.bytes_received))
    out.backward(do)
    counts.append((attention.bytes_sent, attention.bytes_received))
    passes = [
        (after[0] - before[0], after[1] - before[1]) for before, after in itertools.pairwise(counts)
    ]
    return {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad, "bytes": passes}
