"""Moves buffers between GPUs that reach each other's memory: copy-engine copies and stream signals.

No SM is taken from attention. A message is written straight into its place at the receiver
(`ultraattn.runtime.transports.places`), which reads it there: no packing, no second copy. A call
with more than its places hold sends the rest in segments through a staging area, `SLOTS` slots for
each peer that sends, with two flags a slot:

    sender                                    receiver (owns the slot)
    wait until its flag `free` is 1, set 0
    copy a segment into the slot
    set the receiver's flag `full` to 1  ──►  wait until `full` is 1, set 0
                                              copy the slot into the buffer
    its flag `free` becomes 1  ◄──────────    set the sender's flag `free` to 1

Streams wait and set flags themselves (`cuStreamBatchMemOp`); no kernel spins. Both ends count the
messages and segments of a call alike, since a plan issues those of a direction in one order at both
ends. After a call every slot and place becomes free again, so captured calls replay.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ultraattn.runtime.streams import SideStream, StreamHandle
from ultraattn.runtime.transports import flags
from ultraattn.runtime.transports.places import MESSAGES, Direction, Places, fitting

SLOTS = 4
STAGING_BYTES = 64 << 20
"""Staging of a rank for all its peers together."""
PLACES_SHARE = 4
"""Places take at most one part in so many of a device's memory."""
FLAG_BYTES = 64
"""Flags stand apart, a line each."""


class SymmetricTransport:
    """Messages through symmetric memory; see `ultraattn.runtime.transports.base.Transport`."""

    name = "symmetric"
    capturable = True

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Collective: every rank of `group` makes it, in the same order.

        Raises:
            RuntimeError: some rank cannot reach a peer's memory.
        """
        import torch.distributed._symmetric_memory as symmetric_memory

        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        device = torch.device("cuda", torch.cuda.current_device())
        self._slot_bytes = _slot_bytes(self._ranks)
        self._staging = self._ranks * SLOTS * self._slot_bytes
        size = self._staging + 2 * self._ranks * SLOTS * FLAG_BYTES
        self._area = symmetric_memory.empty(size, dtype=torch.uint8, device=device)
        self._handle: Any = symmetric_memory.rendezvous(self._area, group)
        self._area[self._staging :].zero_()
        for peer in range(self._ranks):
            for slot in range(SLOTS):
                self._flag(self._rank, "free", peer, slot)[:1].fill_(1)
        torch.cuda.synchronize(device)
        dist.barrier(group)
        self._load()
        dist.barrier(group)
        self._send_stream, self._receive_stream = SideStream(device), SideStream(device)
        self._apart = torch.cuda.ExternalStream(flags.new_stream(), device)  # type: ignore[no-untyped-call]
        """No work of a call stands on it: it goes on when all others wait."""
        self._group_of = weakref.ref(group)
        memory = [0] * self._ranks
        mine = torch.cuda.get_device_properties(device).total_memory
        dist.all_gather_object(memory, mine, group=group)
        self._most_places = min(memory) // PLACES_SHARE // max(1, self._ranks - 1)
        self._places: list[Places] = []
        """By capacity, the smallest first."""
        self.begin(0)
        self.bytes_sent = 0
        self.bytes_received = 0

    def begin(self, size: int) -> None:
        """Calls count segments from 0, so that a captured call fits whatever its peers run."""
        self._now = self._places_for(size)
        self._sent = [0] * self._ranks
        self._received = [0] * self._ranks
        self._put = [Direction() for _ in range(self._ranks)]
        self._accepted = [Direction() for _ in range(self._ranks)]

    def finish(self) -> None:
        """Gives the places of the call back to their senders, once the calling stream is here."""
        stream = torch.cuda.current_stream()
        for source, direction in enumerate(self._accepted):
            if direction.count and self._now is not None:
                self._now.clear(source, direction.count)
                flags.put(stream, self._now.free(source, self._rank))

    def reserve(self, size: int) -> None:
        """Makes places for calls with up to `size` bytes in any direction, within limits.

        Collective: every rank calls it with the same size, and the same sizes before.
        """
        group = self._group_of()
        size = min(size, self._most_places)
        known = self._places[-1].capacity if self._places else 0
        if group is None or size <= known:
            return
        made = Places(group, self._area.device, size)
        made.warm_up()
        torch.cuda.synchronize(self._area.device)
        dist.barrier(group)
        self._places.append(made)

    def put(self, target: int, size: int, write: Callable[[Tensor], None]) -> StreamHandle | None:
        """See `ultraattn.runtime.transports.base.Transport`."""
        places = self._now
        found = None if places is None else self._put[target].take(size, places.capacity)
        if found is None or places is None:
            return None
        start, message = found
        self.bytes_sent += size
        with self._send_stream.forked() as stream:
            if message == 0:
                flags.wait_and_clear(stream, places.free(self._rank, target))
            write(places.place(target, self._rank, start, size))
            flags.put(stream, places.full(target, self._rank, message))
        return self._send_stream.handle()

    def accept(self, source: int, size: int) -> tuple[Tensor, StreamHandle] | None:
        """See `ultraattn.runtime.transports.base.Transport`."""
        places = self._now
        found = None if places is None else self._accepted[source].take(size, places.capacity)
        if found is None or places is None:
            return None
        start, message = found
        self.bytes_received += size
        buffer = places.place(self._rank, source, start, size)
        with self._receive_stream.forked() as stream:
            flags.wait(stream, places.full(self._rank, source, message))
        return buffer, self._receive_stream.handle()

    def send(self, target: int, buffer: Tensor, tag: int) -> StreamHandle:
        """See `ultraattn.runtime.transports.base.Transport`; messages of a direction keep order."""
        self.bytes_sent += buffer.numel()
        with self._send_stream.forked() as stream:
            for start in range(0, buffer.numel(), self._slot_bytes):
                part = buffer[start : start + self._slot_bytes]
                slot = self._sent[target] % SLOTS
                self._sent[target] += 1
                flags.wait_and_clear(
                    stream, self._flag(self._rank, "free", target, slot).data_ptr()
                )
                self._slot(target, self._rank, slot)[: part.numel()].copy_(part)
                flags.put(stream, self._flag(target, "full", self._rank, slot).data_ptr())
        return self._send_stream.handle()

    def receive(self, source: int, buffer: Tensor, tag: int) -> StreamHandle:
        """See `ultraattn.runtime.transports.base.Transport`; messages of a direction keep order."""
        self.bytes_received += buffer.numel()
        with self._receive_stream.forked() as stream:
            for start in range(0, buffer.numel(), self._slot_bytes):
                part = buffer[start : start + self._slot_bytes]
                slot = self._received[source] % SLOTS
                self._received[source] += 1
                flags.wait_and_clear(
                    stream, self._flag(self._rank, "full", source, slot).data_ptr()
                )
                part.copy_(self._slot(self._rank, source, slot)[: part.numel()])
                flags.put(stream, self._flag(source, "free", self._rank, slot).data_ptr())
        return self._receive_stream.handle()

    def arrived(self, size: int) -> dict[int, list[bool]]:
        """Which messages of a call with `size` bytes reserved are in their places, by source.

        For a thread beside the one that calls; it waits for no stream of the call.
        """
        places = self._places_for(size)
        with torch.cuda.stream(self._apart):
            return {
                source: places.arrived(source, MESSAGES)
                for source in range(self._ranks)
                if source != self._rank and places is not None
            }

    def abort(self) -> None:
        """Lets every stream that waits for a peer go on, with whatever stands in the slots."""
        with torch.cuda.stream(self._apart):
            self._area[self._staging :].view(torch.int32).fill_(1)
            for places in self._places:
                places.release()

    def _places_for(self, size: int) -> Places | None:
        return fitting(self._places, min(size, self._most_places))

    def _load(self) -> None:
        """Does everything once, since what a first use loads may wait for all other streams."""
        stream = torch.cuda.current_stream()
        own = self._slot(self._rank, self._rank, 0)
        for peer in range(self._ranks):
            self._slot(peer, self._rank, 0).copy_(own)
            flag = self._flag(self._rank, "free", peer, 0).data_ptr()
            flags.wait_and_clear(stream, flag)
            flags.put(stream, flag)
        torch.cuda.synchronize(self._area.device)

    def _slot(self, owner: int, source: int, slot: int) -> Tensor:
        """The slot at `owner` for segments from `source`."""
        at = (source * SLOTS + slot) * self._slot_bytes
        return self._bytes(owner, at, self._slot_bytes)

    def _flag(self, owner: int, kind: str, peer: int, slot: int) -> Tensor:
        """The flag in the memory of `owner` about its slots for, or at, `peer`; one int32."""
        index = ((kind == "full") * self._ranks + peer) * SLOTS + slot
        at = self._staging + index * FLAG_BYTES
        return self._bytes(owner, at, 4).view(torch.int32)

    def _bytes(self, owner: int, start: int, size: int) -> Tensor:
        if owner == self._rank:
            return self._area[start : start + size]
        found: Tensor = self._handle.get_buffer(owner, [size], torch.uint8, start)
        return found


def _slot_bytes(ranks: int) -> int:
    return STAGING_BYTES // (SLOTS * max(1, ranks)) // 4096 * 4096
