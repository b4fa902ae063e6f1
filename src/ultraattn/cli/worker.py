"""What one rank does in `ultraattn run`: takes the plan, makes its tokens, runs both passes."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from ultraattn.cli.layer import Text, inputs
from ultraattn.plans import Plan
from ultraattn.plans.storage import loads
from ultraattn.runtime import Attention, share

Array = npt.NDArray[np.float32] | npt.NDArray[np.float64]


@dataclass(frozen=True)
class RankResult:
    """What one rank did. Bytes and seconds are (forward, backward)."""

    rank: int
    tensors: dict[str, Array]
    """Its part of out, dq, dk and dv; 16-bit ones as float32, which holds them exactly."""
    sent: tuple[int, int]
    received: tuple[int, int]
    seconds: tuple[float, float]


def work(rank: int, plan_text: str, text: Text) -> RankResult:
    """`run_rank` for `LocalRanks`: rank 0 reads the plan from its file's text and shares it."""
    return run_rank(share(loads(plan_text) if rank == 0 else None), text)


def run_rank(plan: Plan, text: Text) -> RankResult:
    """One forward and one backward pass over the default process group."""
    attention = Attention(plan)
    rank = attention.rank
    x = inputs(plan.problem, text, plan.positions(rank), plan.positions(rank, keys=True))
    leaves = [tensor.requires_grad_() for tensor in (x.q, x.k, x.v)]
    marks, times = [_traffic(attention)], []

    dist.barrier()
    times.append(time.perf_counter())
    out = attention(*leaves)
    times.append(time.perf_counter())
    marks.append(_traffic(attention))

    dist.barrier()
    times.append(time.perf_counter())
    out.backward(x.dout)
    times.append(time.perf_counter())
    marks.append(_traffic(attention))

    sent, received = (
        (marks[1][way] - marks[0][way], marks[2][way] - marks[1][way]) for way in (0, 1)
    )
    found = (out, *(leaf.grad for leaf in leaves))
    tensors = {
        name: _array(tensor)
        for name, tensor in zip(("out", "dq", "dk", "dv"), found, strict=True)
        if tensor is not None
    }
    seconds = (times[1] - times[0], times[3] - times[2])
    return RankResult(rank, tensors, sent, received, seconds)


def _traffic(attention: Attention) -> tuple[int, int]:
    return attention.bytes_sent, attention.bytes_received


def _array(tensor: torch.Tensor) -> Array:
    tensor = tensor.detach()
    wide = tensor if tensor.dtype == torch.float64 else tensor.float()
    array: Array = wide.numpy()
    return array
