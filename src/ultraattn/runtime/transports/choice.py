"""Chooses what serves a process group: its device and the transport between its ranks."""

from __future__ import annotations

import logging
import os

import torch
import torch.distributed as dist

from ultraattn.errors import InputError
from ultraattn.runtime.transports.base import Transport
from ultraattn.runtime.transports.gloo import GlooTransport

logger = logging.getLogger(__name__)

SHARED_GPU = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
"""Set to 1, PyTorch lets several ranks share a GPU: for tests on a machine with one."""
NAMES = ("auto", "gloo", "nccl", "symmetric")


def device_of(group: dist.ProcessGroup) -> torch.device:
    """CUDA's current device where the group has a backend for it, else the CPU.

    Raises:
        InputError: the group serves neither.
    """
    kinds = {device.type for device in group._device_types}
    if "cuda" in kinds and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if "cpu" in kinds:
        return torch.device("cpu")
    raise InputError(
        f"process group for {', '.join(sorted(kinds)) or 'no device'}: expected one that serves "
        "CUDA or CPU tensors; use init_process_group('nccl'), 'gloo', or 'cpu:gloo,cuda:nccl'"
    )


def transport_for(group: dist.ProcessGroup, device: torch.device, name: str = "auto") -> Transport:
    """The transport of that name, or the fastest that serves the group. Collective.

    Symmetric memory where all ranks are on one host and reach each other's memory, else NCCL.

    Raises:
        InputError: no transport has that name, or it cannot serve the group.
    """
    if name not in NAMES:
        raise InputError(f"transport {name!r}: expected one of {', '.join(NAMES)}")
    if device.type == "cpu":
        if name not in ("auto", "gloo"):
            raise InputError(f"transport {name!r} needs CUDA, the group serves {device}; use gloo")
        return GlooTransport(group)
    from ultraattn.runtime.transports.nccl import NcclTransport
    from ultraattn.runtime.transports.symmetric import SymmetricTransport

    if name == "gloo":
        raise InputError(f"transport 'gloo' needs CPU tensors, the group serves {device}")
    reached = name != "nccl" and _all_reach_each_other(group, device)
    if reached:
        return SymmetricTransport(group)
    if name == "symmetric":
        raise InputError(
            "transport 'symmetric': some ranks are on other hosts, or on GPUs without access to "
            "each other's memory; use nccl"
        )
    return NcclTransport(group)


def _all_reach_each_other(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether every rank can copy to every other's memory; all ranks get one answer."""
    import socket

    ranks = dist.get_world_size(group)
    facts: list[tuple[str, int, list[int]]] = [("", 0, [])] * ranks
    at = device.index or 0
    peers = [
        other
        for other in range(torch.cuda.device_count())
        if other == at or torch.cuda.can_device_access_peer(at, other)
    ]
    dist.all_gather_object(facts, (socket.gethostname(), at, peers), group=group)
    hosts = {host for host, _, _ in facts}
    indices = [index for _, index, _ in facts]
    reached = all(index in peers for _, _, peers in facts for index in indices)
    logger.info("%d ranks on %d hosts, peer access: %s", ranks, len(hosts), reached)
    apart = len(set(indices)) == ranks or os.environ.get(SHARED_GPU) == "1"
    return len(hosts) == 1 and apart and reached
