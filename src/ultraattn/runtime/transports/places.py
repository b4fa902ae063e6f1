"""Memory of each rank into which its peers write messages themselves, and the flags about it.

A place is used once a call. What a sender and a receiver of one direction share:

    sender                                     receiver (owns the places)
    first message of a call:
    wait until its flag `free` is 1, set 0
    write message i into its place
    set the receiver's flag `full` i to 1  ──►  wait until `full` i is 1; read it where it is
                                                end of the call: set every `full` to 0,
    its flag `free` becomes 1  ◄─────────────   set the sender's flag `free` to 1

Both count the messages and bytes of a direction alike, since a plan issues them in one order at
both ends: so places need no agreement, and a captured call finds its own again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ultraattn.runtime import copies
from ultraattn.runtime.transports import flags

MESSAGES = 256
"""Messages of a direction in one call that have places."""
FLAG_BYTES = 64
"""Flags `free` stand apart, a line each; flags `full` side by side, cleared at once."""
ALIGN_BYTES = 256
WARM_BYTES = 8192


class Direction:
    """What one direction between two ranks has used of its places in a call.

    Once a message does not fit, none that comes later has a place either: so the messages with
    places are the first ones of the direction, and their numbers are those of the plan's order.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self.count = 0
        self._full = False

    def take(self, size: int, capacity: int) -> tuple[int, int] | None:
        """The place (first byte, number) of the next message; None where it does not fit."""
        self._full |= self.bytes + size > capacity or self.count >= MESSAGES
        if self._full:
            return None
        found = self.bytes, self.count
        self.bytes += -(-size // ALIGN_BYTES) * ALIGN_BYTES
        self.count += 1
        return found


def fitting(places: Sequence[Places], size: int) -> Places | None:
    """The places of a call with up to `size` bytes in a direction: the first that hold them.

    Capacities ascend, and larger places that are made later come behind. So every run of a call
    takes the same places, on every rank, whether it is captured before they are made or after.
    Where none is large enough, these are the largest.
    """
    return next((x for x in places if x.capacity >= size), places[-1] if places else None)


class Places:
    """Places of `capacity` bytes for each direction. Collective to make.

    Raises:
        RuntimeError: some rank cannot reach a peer's memory.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, capacity: int) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        self._rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        self.capacity = -(-capacity // ALIGN_BYTES) * ALIGN_BYTES
        self._full = (ranks - 1) * self.capacity
        self._free = self._full + (ranks - 1) * MESSAGES * 4
        self.bytes = self._free + ranks * FLAG_BYTES
        area = symmetric_memory.empty(self.bytes, dtype=torch.uint8, device=device)
        self._handle: Any = symmetric_memory.rendezvous(area, group)
        self._of = [
            area
            if owner == self._rank
            else self._handle.get_buffer(owner, [self.bytes], torch.uint8, 0)
            for owner in range(ranks)
        ]
        area[self._full :].zero_()
        for peer in range(ranks):
            self._flag(self._rank, self.free(self._rank, peer)).fill_(1)
        torch.cuda.synchronize(device)
        dist.barrier(group)

    def place(self, owner: int, source: int, start: int, size: int) -> Tensor:
        """Bytes at `owner` for a message from `source`."""
        at = self._index(owner, source) * self.capacity + start
        return self._of[owner][at : at + size]

    def full(self, owner: int, source: int, message: int) -> int:
        """The address of the flag at `owner` about a message from `source`."""
        return self._of[owner].data_ptr() + self._full_at(owner, source) + 4 * message

    def free(self, owner: int, target: int) -> int:
        """The address of the flag at `owner` that its places at `target` are free."""
        return self._of[owner].data_ptr() + self._free + target * FLAG_BYTES

    def clear(self, source: int, count: int) -> None:
        """Sets the flags `full` of this rank about messages from `source` to 0."""
        at = self._full_at(self._rank, source)
        self._of[self._rank][at : at + 4 * count].zero_()

    def arrived(self, source: int, count: int) -> list[bool]:
        """Which messages of a direction to this rank are here; waits for the calling stream."""
        at = self._full_at(self._rank, source)
        return [bool(x) for x in self._of[self._rank][at : at + 4 * count].view(torch.int32).cpu()]

    def release(self) -> None:
        """Sets all flags of this rank, on the calling stream: whoever waits goes on."""
        self._of[self._rank][self._full :].view(torch.int32).fill_(1)

    def warm_up(self) -> None:
        """Does everything once, since what a first use loads may wait for all other streams."""
        stream = torch.cuda.current_stream()
        mine = self.free(self._rank, self._rank)
        flags.wait_and_clear(stream, mine)
        flags.put(stream, mine)
        flags.wait(stream, mine)
        for owner, area in enumerate(self._of):
            if owner != self._rank and self.capacity >= WARM_BYTES:
                own = self._of[self._rank][:WARM_BYTES]
                area[:WARM_BYTES].copy_(own)
                rows = (x[:WARM_BYTES].view(2, 2, -1)[:, 0] for x in (area, own))
                copies.copy(*rows)

    def _flag(self, owner: int, address: int) -> Tensor:
        at = address - self._of[owner].data_ptr()
        return self._of[owner][at : at + 4].view(torch.int32)

    def _full_at(self, owner: int, source: int) -> int:
        return self._full + self._index(owner, source) * MESSAGES * 4

    def _index(self, owner: int, source: int) -> int:
        return source - (source > owner)
