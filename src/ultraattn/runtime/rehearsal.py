"""Runs a pass without its peers, so that nothing in the real run makes the host wait.

The first launch of a kernel loads it, and the driver may wait for all work on the device to do so.
Where that work is a stream that waits for a peer, whose host waits in the same way, both stand
still for good. A rehearsal runs every task once with a transport that moves nothing: kernels are
compiled and loaded, buffers made, and the results are thrown away.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from ultraattn.runtime.session import Session
from ultraattn.runtime.transports.base import NoPlaces
from ultraattn.runtime.workspace import Workspace


class _Done:
    """A message that is never sent."""

    def wait(self, timeout_s: float) -> None:
        """Returns at once."""


class _Silence(NoPlaces):
    """A transport that moves nothing; see `ultraattn.runtime.transports.base.Transport`."""

    name = "silence"

    def __init__(self, session: Session) -> None:
        self._session = session
        self.bytes_sent = 0
        self.bytes_received = 0

    def begin(self, size: int) -> None:
        """Nothing to do."""

    def send(self, target: int, buffer: Tensor, tag: int) -> _Done:
        """Leaves `buffer` where it is."""
        return _Done()

    def receive(self, source: int, buffer: Tensor, tag: int) -> _Done:
        """Leaves whatever stands in `buffer`."""
        return _Done()

    def abort(self) -> None:
        """A rank that fails its rehearsal fails its group."""
        self._session.transport.abort()


def rehearsal_of(session: Session) -> Session:
    """The session with its watch, but no peers; waits for the device first.

    Its buffers are its own: the real run has others, for what it receives stands elsewhere.
    """
    torch.cuda.synchronize(session.device)
    alone = copy.copy(session)
    alone.transport = _Silence(session)
    alone.workspace = Workspace(session.device)
    alone.trace = None
    return alone
