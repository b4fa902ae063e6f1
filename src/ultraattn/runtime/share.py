"""Passes a plan from the rank that made it to all ranks of a group, as the bytes of its file."""

from __future__ import annotations

import datetime
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ultraattn.errors import InputError, RunError
from ultraattn.plans.plan import Plan
from ultraattn.plans.storage import dumps, loads
from ultraattn.runtime.session import as_group


def share(
    plan: Plan | None, mesh: Any = None, *, source: int = 0, timeout_s: float = 600.0
) -> Plan:
    """The plan of rank `source`, on every rank: one rank plans, the others receive its bytes.

    Args:
        plan: the plan on rank `source`; ignored (may be None) elsewhere.
        mesh: a one-dimensional DeviceMesh, a ProcessGroup, or None for the default group.
        source: the rank of the group that made the plan.
        timeout_s: the longest that a rank waits for the plan.

    Raises:
        RunError: on every rank, where rank `source` has no plan to share, or does not come.
    """
    group = as_group(mesh)
    rank = dist.get_rank(group)
    if not 0 <= source < dist.get_world_size(group):
        raise InputError(
            f"source {source} in a group of {dist.get_world_size(group)} ranks; pass one of them"
        )
    data = dumps(plan).encode() if rank == source and plan is not None else b""
    device = torch.device("cuda") if dist.get_backend(group) == "nccl" else torch.device("cpu")

    def broadcast(tensor: torch.Tensor) -> None:
        work = dist.broadcast(tensor, group_src=source, group=group, async_op=True)
        try:
            work.wait(datetime.timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise RunError(
                f"rank {rank}: rank {source} did not share its plan within {timeout_s:g} s, or is "
                f"gone; see its own error ({error})"
            ) from error

    length = torch.tensor([len(data)], dtype=torch.int64, device=device)
    broadcast(length)
    if not int(length):
        raise RunError(
            f"rank {rank}: rank {source} shared no plan; it must call share(plan, ...) with one, "
            "or all ranks fail where it could not plan"
        )
    buffer = torch.empty(int(length), dtype=torch.uint8, device=device)
    if rank == source:
        buffer.copy_(torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy()))
    broadcast(buffer)
    if rank == source and plan is not None:
        return plan
    return loads(bytes(buffer.cpu().numpy().tobytes()).decode(), "shared plan")
