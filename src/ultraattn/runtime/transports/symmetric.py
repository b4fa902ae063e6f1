"""Moves buffers between GPUs that reach each other's memory: copy-engine copies and stream signals.

No SM is taken from attention. Each rank holds a staging area in symmetric memory, `SLOTS` slots for
each peer that sends to it, and two flags a slot in its own memory:

    sender                                    receiver (owns the slot)
    wait until its flag `free` is 1, set 0
    copy a segment into the slot
    set the receiver's flag `full` to 1  ──►  wait until `full` is 1, set 0
                                              copy the slot into the buffer
    its flag `free` becomes 1  ◄──────────    set the sender's flag `free` to 1

Streams wait and set flags themselves (`cuStreamWaitValue32`, `cuStreamWriteValue32`); no kernel
spins. A message longer than a slot travels in segments. Both ends count the segments of a call
alike, since a plan issues the messages of a direction in one order at both ends. After a call every
slot becomes free again, so captured calls replay.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ultraattn.runtime.streams import SideStream, StreamHandle

SLOTS = 4
STAGING_BYTES = 256 << 20
"""Staging of a rank for all its peers together."""
FLAG_BYTES = 64
"""Flags stand apart, a line each."""
EQUAL = 1
"""CU_STREAM_WAIT_VALUE_EQ."""


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
        flags = 2 * self._ranks * SLOTS * FLAG_BYTES
        self._area = symmetric_memory.empty(self._staging + flags, dtype=torch.uint8, device=device)
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
        self._sent = [0] * self._ranks
        self._received = [0] * self._ranks
        self.bytes_sent = 0
        self.bytes_received = 0

    def begin(self) -> None:
        """Calls count segments from 0, so that a captured call fits whatever its peers run."""
        self._sent = [0] * self._ranks
        self._received = [0] * self._ranks

    def send(self, target: int, buffer: Tensor, tag: int) -> StreamHandle:
        """See `ultraattn.runtime.transports.base.Transport`; messages of a direction keep order."""
        self.bytes_sent += buffer.numel()
        with self._send_stream.forked() as stream:
            for start in range(0, buffer.numel(), self._slot_bytes):
                part = buffer[start : start + self._slot_bytes]
                slot = self._sent[target] % SLOTS
                self._sent[target] += 1
                _wait_and_clear(stream, self._flag(self._rank, "free", target, slot))
                self._slot(target, self._rank, slot)[: part.numel()].copy_(part)
                _set(stream, self._flag(target, "full", self._rank, slot))
        return self._send_stream.handle()

    def receive(self, source: int, buffer: Tensor, tag: int) -> StreamHandle:
        """See `ultraattn.runtime.transports.base.Transport`; messages of a direction keep order."""
        self.bytes_received += buffer.numel()
        with self._receive_stream.forked() as stream:
            for start in range(0, buffer.numel(), self._slot_bytes):
                part = buffer[start : start + self._slot_bytes]
                slot = self._received[source] % SLOTS
                self._received[source] += 1
                _wait_and_clear(stream, self._flag(self._rank, "full", source, slot))
                part.copy_(self._slot(self._rank, source, slot)[: part.numel()])
                _set(stream, self._flag(source, "free", self._rank, slot))
        return self._receive_stream.handle()

    def abort(self) -> None:
        """Lets every stream that waits for a peer go on, with whatever stands in the slots."""
        side = torch.cuda.Stream(self._area.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(side):
            self._area[self._staging :].fill_(1)

    def _load(self) -> None:
        """Does everything once, since what a first use loads may wait for all other streams."""
        stream = torch.cuda.current_stream()
        own = self._slot(self._rank, self._rank, 0)
        for peer in range(self._ranks):
            self._slot(peer, self._rank, 0).copy_(own)
            flag = self._flag(self._rank, "free", peer, 0)
            _wait_and_clear(stream, flag)
            _set(stream, flag)
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


@functools.cache
def _driver() -> Any:
    driver = ctypes.CDLL("libcuda.so.1")
    for name in ("cuStreamWaitValue32_v2", "cuStreamWriteValue32_v2"):
        function = getattr(driver, name)
        function.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
        function.restype = ctypes.c_int
    return driver


def _check(code: int, what: str) -> None:
    if code:
        raise RuntimeError(f"{what} failed with CUDA driver error {code}")


def _wait_and_clear(stream: torch.cuda.Stream, flag: Tensor) -> None:
    """The stream goes on once the flag is 1, and sets it to 0."""
    driver, at = _driver(), flag.data_ptr()
    _check(driver.cuStreamWaitValue32_v2(stream.cuda_stream, at, 1, EQUAL), "waiting for a flag")
    _check(driver.cuStreamWriteValue32_v2(stream.cuda_stream, at, 0, 0), "clearing a flag")


def _set(stream: torch.cuda.Stream, flag: Tensor) -> None:
    """The stream sets the flag to 1 after all that stands before it is visible to its reader."""
    code = _driver().cuStreamWriteValue32_v2(stream.cuda_stream, flag.data_ptr(), 1, 0)
    _check(code, "setting a flag")
