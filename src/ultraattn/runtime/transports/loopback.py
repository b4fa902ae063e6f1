"""Hands buffers between ranks that live in one process, each in a thread: a plan without a group.

For tests: all ranks of a plan on one device, whatever kernels it has. A send waits for its receive
to copy the buffer, as over a real link, so orders that would hang there hang here (until the
timeout). On CUDA all ranks share the calling stream, so copies follow what they read.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass, field

from torch import Tensor

from ultraattn.runtime.transports.base import NoPlaces

Key = tuple[int, int, int]


@dataclass
class _Message:
    """A buffer on offer, from its send until its receive has copied it."""

    offered: threading.Event = field(default_factory=threading.Event)
    taken: threading.Event = field(default_factory=threading.Event)
    buffer: Tensor | None = None


class Loopback:
    """The links between `ranks` ranks of one process."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.broken = threading.Event()
        self._messages: dict[Key, _Message] = defaultdict(_Message)
        self._lock = threading.Lock()

    def message(self, key: Key) -> _Message:
        """The message from a source to a target with a tag."""
        with self._lock:
            return self._messages[key]

    def forget(self, key: Key) -> None:
        """Ends a message, so that its tag can be used again."""
        with self._lock:
            self._messages.pop(key, None)

    def transport(self, rank: int) -> LoopbackTransport:
        """Rank `rank`'s side."""
        return LoopbackTransport(self, rank)


class LoopbackTransport(NoPlaces):
    """One rank's side of a `Loopback`; see `ultraattn.runtime.transports.base.Transport`."""

    name = "loopback"

    def __init__(self, links: Loopback, rank: int) -> None:
        self._links = links
        self._rank = rank
        self.bytes_sent = 0
        self.bytes_received = 0

    def begin(self, size: int) -> None:
        """Nothing to do."""

    def send(self, target: int, buffer: Tensor, tag: int) -> LoopbackHandle:
        """Offers `buffer` to rank `target`."""
        self.bytes_sent += buffer.numel() * buffer.element_size()
        key = (self._rank, target, tag)
        message = self._links.message(key)
        message.buffer = buffer
        message.offered.set()
        return LoopbackHandle(self._links, key, None)

    def receive(self, source: int, buffer: Tensor, tag: int) -> LoopbackHandle:
        """Will copy what rank `source` offers into `buffer`."""
        self.bytes_received += buffer.numel() * buffer.element_size()
        return LoopbackHandle(self._links, (source, self._rank, tag), buffer)

    def abort(self) -> None:
        """Breaks every wait of every rank."""
        self._links.broken.set()


@dataclass
class LoopbackHandle:
    """A message on its way; `into` is where a receive wants it."""

    links: Loopback
    key: Key
    into: Tensor | None

    def wait(self, timeout_s: float) -> None:
        """Returns when the buffer was copied; see `ultraattn.runtime.transports.base.Handle`."""
        message = self.links.message(self.key)
        if self.into is None:
            self._wait(message.taken, timeout_s)
            self.links.forget(self.key)
            return
        self._wait(message.offered, timeout_s)
        assert message.buffer is not None
        self.into.copy_(message.buffer)
        message.taken.set()

    def _wait(self, event: threading.Event, timeout_s: float) -> None:
        step_s, waited_s = 0.05, 0.0
        while not event.wait(step_s):
            waited_s += step_s
            source, target, tag = self.key
            if self.links.broken.is_set():
                raise RuntimeError("another rank failed")
            if waited_s > timeout_s:
                raise RuntimeError(
                    f"no message {tag} from rank {source} to rank {target} within {timeout_s:g} s"
                )
