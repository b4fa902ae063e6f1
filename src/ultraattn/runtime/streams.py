"""Forks work to side streams of a CUDA device and joins it again, without waiting on the host.

    calling stream   ──●───────── attention ─────────●── merge
                       └► send stream: copy, signal ──┘
    fork: the side stream starts after what the calling stream has issued;
    join: the calling stream goes on after the side stream's work.

Every fork is joined before a call ends, so a call can be captured in a graph, and buffers are safe
to reuse in the order of the calling stream: no `record_stream`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

_streams: dict[tuple[int, int], torch.cuda.Stream] = {}


def calling_stream(device: torch.device) -> torch.cuda.Stream:
    """The current stream of `device`; one object a stream, since making one costs the host 5 us."""
    index = torch.cuda.current_device() if device.index is None else device.index
    raw = torch._C._cuda_getCurrentRawStream(index)
    found = _streams.get((index, raw))
    if found is None:
        found = _streams[index, raw] = torch.cuda.current_stream(device)
    return found


@dataclass
class StreamHandle:
    """Work on a side stream; see `ultraattn.runtime.transports.base.Handle`."""

    done: torch.cuda.Event

    def wait(self, timeout_s: float) -> None:
        """The calling stream goes on after the work; the host does not wait."""
        torch.cuda.current_stream().wait_event(self.done)


class SideStream:
    """A stream beside the calling one; `high` gives it priority over attention."""

    def __init__(self, device: torch.device, *, high: bool = True) -> None:
        self._stream = torch.cuda.Stream(device, priority=-1 if high else 0)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def forked(self) -> Iterator[torch.cuda.Stream]:
        """Work inside goes to the side stream, after what the calling stream has issued."""
        start = torch.cuda.Event()  # type: ignore[no-untyped-call]
        start.record()
        self._stream.wait_event(start)
        with torch.cuda.stream(self._stream):
            yield self._stream

    def handle(self) -> StreamHandle:
        """What was issued to the side stream so far."""
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(self._stream)
        return StreamHandle(done)
