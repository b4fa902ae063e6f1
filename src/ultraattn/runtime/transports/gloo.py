"""Moves buffers between CPU processes with torch.distributed's gloo backend."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor


@dataclass
class GlooHandle:
    """A gloo message; keeps its buffer alive until it is done."""

    work: Any
    buffer: Tensor

    def wait(self, timeout_s: float) -> None:
        """See `ultraattn.runtime.transports.base.Handle`."""
        self.work.wait(datetime.timedelta(seconds=timeout_s))


class GlooTransport:
    """Point-to-point messages over a gloo process group; progress is made during compute."""

    name = "gloo"

    def __init__(self, group: dist.ProcessGroup) -> None:
        """`group` must have a CPU backend."""
        self._group = group
        self._rank_of = [dist.get_global_rank(group, r) for r in range(dist.get_world_size(group))]
        self.bytes_sent = 0
        self.bytes_received = 0

    def send(self, target: int, buffer: Tensor, tag: int) -> GlooHandle:
        """See `ultraattn.runtime.transports.base.Transport`."""
        self.bytes_sent += buffer.numel() * buffer.element_size()
        work = dist.isend(buffer, self._rank_of[target], group=self._group, tag=tag)
        return GlooHandle(work, buffer)

    def receive(self, source: int, buffer: Tensor, tag: int) -> GlooHandle:
        """See `ultraattn.runtime.transports.base.Transport`."""
        self.bytes_received += buffer.numel() * buffer.element_size()
        work = dist.irecv(buffer, self._rank_of[source], group=self._group, tag=tag)
        return GlooHandle(work, buffer)
