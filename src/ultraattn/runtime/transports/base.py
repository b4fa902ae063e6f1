"""What a transport is: it moves flat buffers between ranks without waiting, and counts bytes."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Handle(Protocol):
    """A message on its way."""

    def wait(self, timeout_s: float) -> None:
        """Returns when the buffer may be read (a receive) or written again (a send).

        Raises:
            RuntimeError: the peer is gone, or the message took longer than `timeout_s`.
        """


class Transport(Protocol):
    """Moves contiguous buffers between the ranks of a group."""

    name: str
    bytes_sent: int
    bytes_received: int

    def begin(self) -> None:
        """Every call begins with this, on all ranks."""

    def send(self, target: int, buffer: Tensor, tag: int) -> Handle:
        """Starts to send `buffer` (uint8, flat) to rank `target` of the group.

        This and the other methods raise RuntimeError where a peer or the group is gone.
        """

    def receive(self, source: int, buffer: Tensor, tag: int) -> Handle:
        """Starts to receive into `buffer` (uint8, flat) from rank `source` of the group."""

    def abort(self) -> None:
        """Breaks the connections of this rank, so that no peer waits for it any more."""
