"""Runs a plan forward and backward on one rank; importable by the ranks' processes."""

from __future__ import annotations

from typing import Any


def attend(rank: int, plan: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """Local results and the bytes that this rank sent in each pass."""
    import torch

    import ultraattn as ua

    attention = ua.Attention(plan, timeout_s=60)
    q = torch.from_numpy(plan.shard(tensors["q"], rank, dim=2)).requires_grad_()
    k, v = (
        torch.from_numpy(plan.shard(tensors[name], rank, dim=2, keys=True)).requires_grad_()
        for name in ("k", "v")
    )
    before = attention.bytes_sent
    out = attention(q, k, v)
    middle = attention.bytes_sent
    out.backward(torch.from_numpy(plan.shard(tensors["do"], rank, dim=2)))
    found = {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}
    results: dict[str, Any] = {name: x.numpy() for name, x in found.items() if x is not None}
    results["bytes_sent"] = (middle - before, attention.bytes_sent - middle)
    return results
