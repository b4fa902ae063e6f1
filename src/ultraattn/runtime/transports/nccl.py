"""Moves buffers between CUDA processes with NCCL: for links between nodes, and without peer access.

A send and a receive on one communicator wait for each other in the order in which they were issued
there. Each direction between two ranks has a communicator of its own, made up front in one order
on all ranks, and a plan issues the messages of a direction in one order at both ends: so no send
stands behind a receive that its peer issues later. NCCL runs on SMs, beside attention.
"""

from __future__ import annotations

import datetime
import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ultraattn.runtime.transports.base import NoPlaces


@dataclass
class NcclHandle:
    """An NCCL message; keeps its buffer alive until the calling stream waits for it."""

    work: Any
    buffer: Tensor

    def wait(self, timeout_s: float) -> None:
        """The calling stream goes on after the message; the host does not wait."""
        self.work.wait()


class NcclTransport(NoPlaces):
    """Point-to-point messages over NCCL; see `ultraattn.runtime.transports.base.Transport`."""

    name = "nccl"
    capturable = False
    """Captured sends and receives on several communicators are not verified."""

    def __init__(self, group: dist.ProcessGroup, timeout_s: float = 600.0) -> None:
        """Collective: every rank of `group` makes it, in the same order."""
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        self._rank = rank
        self._channels: dict[tuple[int, int], dist.ProcessGroup] = {}
        self.bytes_sent = 0
        self.bytes_received = 0
        self._world = world = [dist.get_global_rank(group, r) for r in range(ranks)]
        for source in range(ranks):
            for target in range(ranks):
                if source != target and rank in (source, target):
                    self._channels[source, target] = _channel(world, source, target, timeout_s)
        device = torch.device("cuda", torch.cuda.current_device())
        for key in sorted(self._channels):
            self._warm_up(key, device)
        weakref.finalize(self, _destroy, list(self._channels.values()))

    def begin(self, size: int) -> None:
        """Nothing to do."""

    def send(self, target: int, buffer: Tensor, tag: int) -> NcclHandle:
        """See `ultraattn.runtime.transports.base.Transport`; messages of a direction keep order."""
        self.bytes_sent += buffer.numel() * buffer.element_size()
        peer = int(self._world[target] > self._world[self._rank])
        return NcclHandle(self._channels[self._rank, target].send([buffer], peer, 0), buffer)

    def receive(self, source: int, buffer: Tensor, tag: int) -> NcclHandle:
        """See `ultraattn.runtime.transports.base.Transport`; messages of a direction keep order."""
        self.bytes_received += buffer.numel() * buffer.element_size()
        peer = int(self._world[source] > self._world[self._rank])
        return NcclHandle(self._channels[source, self._rank].recv([buffer], peer, 0), buffer)

    def abort(self) -> None:
        """Breaks the communicators of this rank."""
        for channel in self._channels.values():
            channel.abort()

    def _warm_up(self, key: tuple[int, int], device: torch.device) -> None:
        """Sends one byte, since NCCL connects at the first message."""
        byte = torch.zeros(1, dtype=torch.uint8, device=device)
        source, target = key
        mine = source == self._rank
        handle = self.send(target, byte, 0) if mine else self.receive(source, byte, 0)
        handle.wait(0.0)
        self.bytes_sent = self.bytes_received = 0
        torch.cuda.synchronize(device)


def _channel(world: list[int], source: int, target: int, timeout_s: float) -> dist.ProcessGroup:
    """A group of two, made by its members alone; its ranks are in ascending order."""
    made: dist.ProcessGroup = dist.new_group(
        [world[source], world[target]],
        timeout=datetime.timedelta(seconds=timeout_s),
        backend="nccl",
        use_local_synchronization=True,
        group_desc=f"ultraattn {source} to {target}",
    )
    return made


def _destroy(channels: list[dist.ProcessGroup]) -> None:
    if dist.is_initialized():
        for channel in channels:
            dist.destroy_process_group(channel)
