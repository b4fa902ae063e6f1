"""Tells ranks of each other's faults: who failed or stopped, in which task, and why.

When a rank dies, its peers see broken connections in an order of their own and blame each other.
So every rank writes what it is doing into the group's store, a few times a second; the first to
fail writes who and why before it leaves; and a rank whose wait breaks reads both. The first verdict
that is written is the one that all ranks report:

    rank 2 dies in task 7          rank 0 waits for 1, rank 1 waits for 2
    rank 1's wait breaks           2 gives no sign any more: rank 1 writes "rank 2 ... died"
    rank 0's wait breaks           1 is alive and waits for 2: the same verdict, or it reads that
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from ultraattn.errors import RunError

BEAT_S = 0.5
"""Seconds between two signs of life of a rank that does the same for long."""
LOOK_S = 0.05
"""Seconds between two looks at what this rank does; longer in large groups, which share a store."""
GRACE_S = 2.5
"""Seconds that a rank whose wait broke looks for a written verdict and for signs of life."""

BETWEEN_CALLS = "between calls"


@dataclass
class Activity:
    """What a rank does now."""

    call: str = ""
    """The call it is in; empty between calls."""
    task: str = BETWEEN_CALLS
    waits_for: int = -1
    """The rank it waits for, or -1."""
    number: int = 0
    """Calls it has begun."""
    beat: int = 0


class Watch:
    """One rank's side of the watch over its group.

    Args:
        store: a `torch.distributed.Store` that every rank of the group reaches, prefixed so that
            its keys are the group's own.
        rank: this rank.
        ranks: ranks of the group.
    """

    def __init__(self, store: Any, rank: int, ranks: int) -> None:
        self._store = store
        self._rank = rank
        self._ranks = ranks
        self.now = Activity()
        stop = threading.Event()
        thread = threading.Thread(
            target=_beat,
            args=(weakref.ref(self), stop, max(LOOK_S, ranks / 1000)),
            daemon=True,
            name="ultraattn-watch",
        )
        weakref.finalize(self, _end, stop, thread)
        thread.start()

    @contextlib.contextmanager
    def calling(self, call: str) -> Iterator[None]:
        """While it lasts, the rank is in `call`: a text that all ranks give alike."""
        self.now.call = call
        self.now.number += 1
        yield
        self.now.call, self.now.task = "", BETWEEN_CALLS

    def failed(self, cause: BaseException) -> str:
        """Writes that this rank failed in what it does now; gives the verdict of the group."""
        text = f"rank {self._rank} failed in {self.now.task}: {type(cause).__name__}: {cause}"
        return self.blame(text)

    def blame(self, verdict: str) -> str:
        """Writes a verdict unless there is one; gives the one that all ranks report."""
        try:
            believed = self._store.compare_set("failure", "", verdict)
        except Exception:
            return verdict
        return bytes(believed).decode() or verdict

    def failure(self) -> str | None:
        """The verdict that some rank wrote, if any."""
        try:
            if self._store.check(["failure"]):
                return str(self._store.get("failure").decode())
        except Exception as error:
            return (
                "the group's store is gone: the process that holds it, rank 0 or the launcher, "
                f"stopped ({error})"
            )
        return None

    def explain(self, task: str, peer: int, error: BaseException) -> RunError:
        """Why a wait for `peer` broke: the verdict of the group, found now if need be."""
        cause = self._investigate(peer)
        return RunError(f"rank {self._rank}, {task}, waiting for rank {peer}: {cause} ({error})")

    def signs(self) -> dict[int, Activity]:
        """What every rank last said that it does; none of those that never said anything."""
        found = {}
        with contextlib.suppress(Exception):
            for rank in range(self._ranks):
                key = f"beat/{rank}"
                if self._store.check([key]):
                    found[rank] = Activity(**json.loads(self._store.get(key).decode()))
        return found

    def _investigate(self, peer: int) -> str:
        before = self.signs()
        end = time.monotonic() + GRACE_S
        while time.monotonic() < end:
            known = self.failure()
            if known:
                return known
            time.sleep(0.05)
        return self.blame(self._verdict(peer, before, self.signs()))

    def _verdict(self, peer: int, before: dict[int, Activity], after: dict[int, Activity]) -> str:
        """Follows who waits for whom to the rank that waits for nobody."""
        seen: list[int] = [self._rank]
        while peer not in seen:
            seen.append(peer)
            now = after.get(peer)
            if now is None:
                return f"rank {peer} gave no sign of life: it died, or never made its Attention"
            place = f"{now.task} of {now.call}" if now.call else now.task
            if now == before.get(peer):
                return f"rank {peer} died or was stopped; it was last seen in {place}"
            if not now.call:
                return f"rank {peer} is alive but {now.task}: it did not join {self.now.call}"
            if now.number >= self.now.number and now.call != self.now.call:
                return (
                    f"rank {peer} runs {now.call} while rank {self._rank} runs {self.now.call}: "
                    "all ranks must make the same calls, with the same batch"
                )
            if now.waits_for < 0:
                return f"rank {peer} is alive and hangs in {place}"
            peer = now.waits_for
        return f"ranks {seen} wait for each other"

    def beat(self) -> None:
        """Writes what this rank does now."""
        self.now.beat += 1
        self._store.set(f"beat/{self._rank}", json.dumps(asdict(self.now)))


def _beat(watch_of: weakref.ref[Watch], stop: threading.Event, look_s: float) -> None:
    """Beats for as long as the watch and its store exist: when something is new, or time is up."""
    said, said_at = Activity(), 0.0
    while not stop.is_set():
        watch = watch_of()
        if watch is None:
            return
        now = replace(watch.now)
        if now != said or time.monotonic() - said_at > BEAT_S:
            try:
                watch.beat()
            except Exception:
                return
            said, said_at = replace(now, beat=watch.now.beat), time.monotonic()
        idle = not now.call
        del watch
        stop.wait(BEAT_S if idle else look_s)


def _end(stop: threading.Event, thread: threading.Thread) -> None:
    stop.set()
    if thread is not threading.current_thread():
        thread.join(timeout=1.0)
