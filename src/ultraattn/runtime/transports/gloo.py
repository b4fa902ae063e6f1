"""Moves buffers between CPU processes with torch.distributed's gloo backend."""

from __future__ import annotations

import contextlib
import datetime
import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ultraattn.runtime.transports.base import NoPlaces

ABORT_TAG = 2**31 - 1
"""No message has it."""


@dataclass
class GlooHandle:
    """A gloo message; keeps its buffer alive until it is done."""

    work: Any
    buffer: Tensor

    def wait(self, timeout_s: float) -> None:
        """See `ultraattn.runtime.transports.base.Handle`."""
        self.work.wait(datetime.timedelta(seconds=timeout_s))


class GlooTransport(NoPlaces):
    """Point-to-point messages over a gloo process group; progress is made during compute."""

    name = "gloo"

    def __init__(self, group: dist.ProcessGroup) -> None:
        """`group` must have a CPU backend. It is not kept alive."""
        self._group_of = weakref.ref(group)
        self._rank = dist.get_rank(group)
        self._ranks = dist.get_world_size(group)
        self.bytes_sent = 0
        self.bytes_received = 0

    def begin(self, size: int) -> None:
        """Nothing to do."""

    def send(self, target: int, buffer: Tensor, tag: int) -> GlooHandle:
        """See `ultraattn.runtime.transports.base.Transport`."""
        work = self._group().send([buffer], target, tag)
        self.bytes_sent += buffer.numel() * buffer.element_size()
        return GlooHandle(work, buffer)

    def receive(self, source: int, buffer: Tensor, tag: int) -> GlooHandle:
        """See `ultraattn.runtime.transports.base.Transport`."""
        work = self._group().recv([buffer], source, tag)
        self.bytes_received += buffer.numel() * buffer.element_size()
        return GlooHandle(work, buffer)

    def abort(self) -> None:
        """See `ultraattn.runtime.transports.base.Transport`.

        Gloo closes all connections of a group when a wait runs out of time: one for a message that
        nobody sends does. (The backend's own `abort` does nothing in torch 2.13.)
        """
        buffer = torch.empty(1, dtype=torch.uint8)
        for peer in range(self._ranks):
            if peer != self._rank:
                with contextlib.suppress(RuntimeError):
                    work = self._group().recv([buffer], peer, ABORT_TAG)
                    work.wait(datetime.timedelta(milliseconds=1))

    def _group(self) -> dist.ProcessGroup:
        group = self._group_of()
        if group is None:
            raise RuntimeError("the process group was destroyed; make Attention again on a new one")
        return group
