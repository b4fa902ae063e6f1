"""Tells ranks of each other's faults: who failed or stopped, in which task, and why.

When a rank dies, its peers see broken connections in an order of their own and blame each other.
So the first rank to fail writes who and why into the group's store before it leaves, and every
rank that runs writes once a second what it is doing. A rank whose wait breaks reads both.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ultraattn.errors import RunError

BEAT_S = 1.0
"""Seconds between two signs of life of a running rank."""
GRACE_S = 3.0
"""Seconds that a rank whose wait broke gives the culprit to say what happened."""


@dataclass
class Activity:
    """What a rank does now."""

    task: str = "between calls"
    waits_for: int = -1
    """The rank it waits for, or -1."""


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
        self._beats = 0
        self._running = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self.now = Activity()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """While it lasts, the rank gives signs of life."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._beat, daemon=True, name="ultraattn-watch")
            self._thread.start()
        self._running.set()
        try:
            yield
        finally:
            self._running.clear()
            self.now = Activity()

    def failed(self, task: str, cause: BaseException) -> None:
        """Records that this rank failed; the first of the group to do so is believed."""
        text = f"rank {self._rank} failed in {task}: {type(cause).__name__}: {cause}"
        with contextlib.suppress(Exception), self._lock:
            if self._store.add("failures", 1) == 1:
                self._store.set("failure", text)

    def explain(self, task: str, peer: int, error: BaseException) -> RunError:
        """Why a wait for `peer` broke: the recorded failure, or who stopped at what."""
        cause = self._recorded(GRACE_S) or self._silent(peer)
        return RunError(f"rank {self._rank}, {task}, waiting for rank {peer}: {cause} ({error})")

    def failure(self) -> str | None:
        """The failure that some rank recorded, if any."""
        return self._recorded(0.0)

    def _recorded(self, patience_s: float) -> str | None:
        end = time.monotonic() + patience_s
        while True:
            try:
                with self._lock:
                    if self._store.check(["failure"]):
                        return str(self._store.get("failure").decode())
            except Exception as error:
                return f"the group's store is gone too ({error}): the rank that holds it stopped"
            if time.monotonic() >= end:
                return None
            time.sleep(0.05)

    def _silent(self, peer: int) -> str:
        """Follows who waits for whom to the rank that waits for nobody."""
        seen: list[int] = []
        while peer not in seen and len(seen) < self._ranks:
            seen.append(peer)
            before = self._sign(peer)
            time.sleep(1.5 * BEAT_S)
            after = self._sign(peer)
            if after is None:
                return f"rank {peer} gave no sign of life: it died, or never began this call"
            task, waits_for = after["task"], after["waits_for"]
            if before == after:
                return f"rank {peer} stopped giving signs of life in {task}: it died"
            if waits_for < 0 or waits_for == self._rank:
                return f"rank {peer} is alive and hangs in {task}"
            peer = waits_for
        return f"ranks {seen} wait for each other"

    def _sign(self, rank: int) -> dict[str, Any] | None:
        try:
            with self._lock:
                key = f"beat/{rank}"
                if self._store.check([key]):
                    sign: dict[str, Any] = json.loads(self._store.get(key).decode())
                    return sign
        except Exception:
            return None
        return None

    def _beat(self) -> None:
        while True:
            self._running.wait()
            time.sleep(BEAT_S)
            if not self._running.is_set():
                continue
            self._beats += 1
            sign = {"beat": self._beats, "task": self.now.task, "waits_for": self.now.waits_for}
            with contextlib.suppress(Exception), self._lock:
                self._store.set(f"beat/{self._rank}", json.dumps(sign))
