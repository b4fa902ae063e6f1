"""What a transport is: it moves flat buffers between ranks without waiting, and counts bytes."""

from __future__ import annotations

from collections.abc import Callable
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
    """Moves contiguous buffers between the ranks of a group.

    Some have places: memory of a rank into which its peers write messages themselves. There a
    receive is `accept` and a send is `put`; both say None for a message that has no place, alike at
    both ends, and it travels by `receive` and `send`. All others inherit from `NoPlaces`.
    """

    name: str
    bytes_sent: int
    bytes_received: int

    def begin(self, size: int) -> None:
        """Every call begins with this, on all ranks, with the `size` that was reserved for it."""

    def finish(self) -> None:
        """Every call ends with this: nothing that was received is read any more."""

    def send(self, target: int, buffer: Tensor, tag: int) -> Handle:
        """Starts to send `buffer` (uint8, flat) to rank `target` of the group.

        This and the other methods raise RuntimeError where a peer or the group is gone.
        """

    def receive(self, source: int, buffer: Tensor, tag: int) -> Handle:
        """Starts to receive into `buffer` (uint8, flat) from rank `source` of the group."""

    def put(self, target: int, size: int, write: Callable[[Tensor], None]) -> Handle | None:
        """Sends `size` bytes that `write` writes where they will stand at rank `target`.

        What `write` reads stays as it is until the handle's wait.
        """

    def accept(self, source: int, size: int) -> tuple[Tensor, Handle] | None:
        """Where the next message from rank `source` will stand (uint8, flat), until `finish`."""

    def reserve(self, size: int) -> None:
        """Makes places for calls with up to `size` bytes in any direction. Collective."""

    def abort(self) -> None:
        """Breaks the connections of this rank, so that no peer waits for it any more."""


class NoPlaces:
    """A transport whose messages all travel by `send` and `receive`."""

    def finish(self) -> None:
        """Nothing to do."""

    def put(self, target: int, size: int, write: Callable[[Tensor], None]) -> Handle | None:
        """None."""

    def accept(self, source: int, size: int) -> tuple[Tensor, Handle] | None:
        """None."""

    def reserve(self, size: int) -> None:
        """Nothing to do."""
