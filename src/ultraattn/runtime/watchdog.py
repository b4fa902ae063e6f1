"""Breaks calls that a peer leaves waiting on the device, and says which transfer the peer owed.

Where streams wait for flags, no host waits with them: a peer that stops would leave the device
waiting for good. So a thread looks whether what was launched last is done; when that takes longer
than the call may wait, it reads which messages have not arrived, names the first and its sender,
marks the group as failed, and sets all flags until the streams have run dry. What the broken call
wrote is worthless; the next call of the group raises the verdict.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from dataclasses import dataclass
from typing import Any

import torch

from ultraattn.runtime.steps import Steps
from ultraattn.runtime.streams import calling_stream

logger = logging.getLogger(__name__)

LOOK_S = 0.1
"""Seconds between two looks at the device."""
SIGNS_S = 1.5
"""Seconds in which a rank that lives gives a sign of life."""


@dataclass
class _Launched:
    """The call that was launched last."""

    steps: Steps
    call: str
    timeout_s: float
    end: float
    size: int
    """Bytes that were reserved for it."""


class Watchdog:
    """Watches over the calls of a session whose transport has places."""

    def __init__(self, session: Any) -> None:
        self._session_of = weakref.ref(session)
        self._device = session.device
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._last: _Launched | None = None
        self._stop = threading.Event()
        watchdog_of = weakref.ref(self)
        thread = threading.Thread(
            target=_look, args=(watchdog_of, self._stop, session.device), daemon=True,
            name="ultraattn-watchdog",
        )  # fmt: skip
        weakref.finalize(self, self._stop.set)
        thread.start()

    def launched(self, steps: Steps, call: str, timeout_s: float, size: int) -> None:
        """A call was launched on the current stream, and may take `timeout_s` from now on."""
        if torch.cuda.is_current_stream_capturing():
            return
        self._done.record(calling_stream(self._device))
        self._last = _Launched(steps, call, timeout_s, time.monotonic() + timeout_s, size)

    def look(self) -> None:
        """Breaks the last call if it is late."""
        last, session = self._last, self._session_of()
        if last is None or session is None:
            return
        if self._is_done():
            if self._last is last:
                self._last = None
            return
        if time.monotonic() < last.end:
            return
        verdict = session.watch.blame(self._verdict(session, last))
        logger.error("rank %d: %s", session.rank, verdict)
        session.fail(verdict)
        self._last = None
        while not self._is_done() and not self._stop.wait(0.02):
            session.transport.abort()

    def _is_done(self) -> bool:
        return bool(self._done.query())  # type: ignore[no-untyped-call]

    def _verdict(self, session: Any, last: _Launched) -> str:
        """Names the first message that has not arrived, and whether its sender is alive."""
        before, numbers = session.watch.signs(), dict.fromkeys(range(session.ranks), 0)
        sent = [m for m in last.steps.receives if m.room.bytes]
        state = session.transport.arrived(last.size)
        for message in sent:
            number = numbers[message.peer]
            numbers[message.peer] += 1
            here = state.get(message.peer, [])
            if number < len(here) and here[number]:
                continue
            time.sleep(SIGNS_S)
            after = session.watch.signs()
            stopped = after.get(message.peer) == before.get(message.peer)
            return (
                f"rank {message.peer} {'died or was stopped' if stopped else 'is alive'} and owes "
                f"rank {session.rank} {message.name} of {last.call} for {last.timeout_s:g} s"
            )
        return (
            f"rank {session.rank} has all messages of {last.call}, which is not done after "
            f"{last.timeout_s:g} s: earlier work of its device, or a peer that does not read"
        )


def _look(watchdog_of: weakref.ref[Watchdog], stop: threading.Event, device: torch.device) -> None:
    torch.cuda.set_device(device)
    while not stop.wait(LOOK_S):
        watchdog = watchdog_of()
        if watchdog is None:
            return
        try:
            watchdog.look()
        except Exception:
            logger.exception("watching over the device")
            return
        del watchdog
