"""Lends memory to plans: buffers that calls borrow and give back, sized by capacity."""

from __future__ import annotations

import bisect
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ALIGN_BYTES = 64


@dataclass(frozen=True, eq=False)
class Lease:
    """A borrowed buffer: `bytes` is a flat uint8 tensor, part of what must be given back."""

    bytes: Tensor
    whole: Tensor


class Workspace:
    """Flat byte buffers of one device, shared by all plans of a group.

    It holds nothing between calls: what a buffer contains when it is borrowed is undefined. But
    captured graphs read and write where they did when they were captured, so a buffer stays for as
    long as one of its users lives.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[tuple[int, int, Tensor]] = []
        self._made = 0
        self._users: dict[int, weakref.WeakSet[Any]] = {}
        self.user: weakref.ref[Any] | None = None
        """Who borrows from now on."""
        self.bytes_held = 0
        self.bytes_lent = 0

    def borrow(self, size: int) -> Lease:
        """At least `size` bytes: a free buffer, or a new one."""
        at = bisect.bisect_left(self._free, (size, -1))
        if at < len(self._free) and self._free[at][0] <= 4 * size + 4096:
            _, _, whole = self._free.pop(at)
        else:
            capacity = -(-size // ALIGN_BYTES) * ALIGN_BYTES
            whole = torch.empty(capacity, dtype=torch.uint8, device=self._device)
            self.bytes_held += capacity
        self.bytes_lent += whole.numel()
        user = None if self.user is None else self.user()
        if user is not None:
            self._users.setdefault(id(whole), weakref.WeakSet()).add(user)
        return Lease(whole[:size], whole)

    def give_back(self, lease: Lease) -> None:
        """Returns what `borrow` lent; the caller reads and writes it no more."""
        self.bytes_lent -= lease.whole.numel()
        self._made += 1
        bisect.insort(self._free, (lease.whole.numel(), self._made, lease.whole))

    def forget(self, lease: Lease) -> None:
        """Lets a borrowed buffer go for good: something outside may still write to it."""
        self._users.pop(id(lease.whole), None)
        self.bytes_lent -= lease.whole.numel()
        self.bytes_held -= lease.whole.numel()

    def trim(self) -> None:
        """Frees the buffers that nobody borrows and whose users are gone; waits for the device."""
        gone = [x for x in self._free if not self._users.get(id(x[2]))]
        if not gone:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        for size, _, whole in gone:
            self._users.pop(id(whole), None)
            self.bytes_held -= size
        self._free = [x for x in self._free if id(x[2]) in self._users]
