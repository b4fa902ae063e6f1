"""What one rank does in `ultraattn run` and `bench`: makes its tokens, runs or times plans."""

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

CPU = torch.device("cpu")
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


def run_rank(plan: Plan, text: Text, device: torch.device = CPU) -> RankResult:
    """One forward and one backward pass over the default process group."""
    attention = Attention(plan)
    leaves, dout = rank_inputs(attention, plan, text, device)
    marks, times = [_traffic(attention)], []

    dist.barrier()
    times.append(time.perf_counter())
    out = attention(*leaves)
    times.append(_now(device))
    marks.append(_traffic(attention))

    dist.barrier()
    times.append(time.perf_counter())
    out.backward(dout)
    times.append(_now(device))
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
    return RankResult(attention.rank, tensors, sent, received, seconds)


def time_plans(
    rank: int, plan_texts: dict[str, str], text: Text, repeats: int
) -> dict[str, list[tuple[float, float]]]:
    """`time_rank` for `LocalRanks`."""
    return time_rank({name: loads(data) for name, data in plan_texts.items()}, text, repeats)


def time_rank(
    plans: dict[str, Plan], text: Text, repeats: int, device: torch.device = CPU
) -> dict[str, list[tuple[float, float]]]:
    """Seconds of (forward, forward and backward) of each plan, `repeats` of each.

    Plans take turns, so that a machine that slows down slows all alike; each pass begins at a
    barrier, and one round of all goes before that is not counted.
    """
    ready = {}
    for name, plan in plans.items():
        attention = Attention(plan)
        ready[name] = (attention, *rank_inputs(attention, plan, text, device))
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in plans}
    for turn in range(repeats + 1):
        for name, (attention, leaves, dout) in ready.items():
            dist.barrier()
            begin = time.perf_counter()
            out = attention(*leaves)
            half = _now(device)
            torch.autograd.grad(out, leaves, dout)
            end = _now(device)
            if turn:
                found[name].append((half - begin, end - begin))
    return found


def rank_inputs(
    attention: Attention, plan: Plan, text: Text, device: torch.device
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """This rank's query, key and value, which require gradients, and the output's gradient."""
    rank = attention.rank
    x = inputs(plan.problem, text, plan.positions(rank), plan.positions(rank, keys=True))
    return [t.to(device).requires_grad_() for t in (x.q, x.k, x.v)], x.dout.to(device)


def _now(device: torch.device) -> float:
    """The time once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _traffic(attention: Attention) -> tuple[int, int]:
    return attention.bytes_sent, attention.bytes_received


def _array(tensor: torch.Tensor) -> Array:
    tensor = tensor.detach()
    wide = (tensor if tensor.dtype == torch.float64 else tensor.float()).cpu()
    array: Array = wide.numpy()
    return array
