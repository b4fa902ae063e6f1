"""Holds what the plans of one process group share: transport, workspace, watch, message tags."""

from __future__ import annotations

import hashlib
import time
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from ultraattn.errors import InputError, RunError
from ultraattn.runtime.streams import SideStream
from ultraattn.runtime.transports import Transport
from ultraattn.runtime.transports.base import NoPlaces
from ultraattn.runtime.transports.choice import device_of, transport_for
from ultraattn.runtime.watch import Watch
from ultraattn.runtime.watchdog import Watchdog
from ultraattn.runtime.workspace import Workspace

TAGS = 2**24
"""Message tags in use before they start over."""
BATCHES = 2**6
"""Batch sizes that tags tell apart, so that a message never lands in a buffer of another size."""


class Session:
    """One process group as plans see it. Made by every rank of the group, in the same order.

    It makes no process group and destroys none: the group is the caller's, and is not kept alive.
    """

    def __init__(self, group: dist.ProcessGroup, transport: str = "auto") -> None:
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_world_size(group)
        if self.rank < 0:
            raise InputError("this process is not in the group; pass a group that it belongs to")
        self.device = device_of(group)
        self.transport: Transport = transport_for(group, self.device, transport)
        self.workspace = Workspace(self.device)
        self.asides = asides_on(self.device)
        self._store = _store_of(group, self.rank)
        self.watch = Watch(self._store, self.rank, self.ranks)
        self._next_tag = 0
        self._agreements = 0
        self._failure = ""
        self.watchdog = (
            None if self.ranks == 1 or isinstance(self.transport, NoPlaces) else Watchdog(self)
        )  # else a wait on the host finds out, or there is nobody to wait for
        self.trace: list[tuple[str, int]] | None = None
        """Where it is a list, every run appends (pass, task) in the order in which it runs them."""

    def tags(self, count: int, batch: int) -> int:
        """The first of `count` message tags that no other call in flight uses.

        Every call takes as many on every rank, those without tasks too, so they never drift apart.
        """
        if self._next_tag + count > TAGS:
            self._next_tag = 0
        first = self._next_tag
        self._next_tag += count
        return first + TAGS * (batch % BATCHES)

    def fail(self, cause: str) -> None:
        """Marks the group as failed, and breaks its connections so that no peer waits on."""
        self._failure = cause
        self.transport.abort()

    def refuse_if_failed(self) -> None:
        """Raises RunError where an earlier call failed: messages of that call may be out still."""
        if self._failure:
            raise RunError(
                f"rank {self.rank}: the process group failed in an earlier call; start a new one "
                f"(destroy_process_group, init_process_group) and make Attention again. The "
                f"failure: {self._failure}"
            )

    def agree(self, what: str, digest: str, timeout_s: float) -> None:
        """Returns when every rank of the group has called it with the same digest.

        Raises:
            RunError: on every rank, naming both digests, or the ranks that did not come.
        """
        self.refuse_if_failed()
        number, self._agreements = self._agreements, self._agreements + 1
        keys = [f"agree/{number}/{rank}" for rank in range(self.ranks)]
        self._store.set(keys[self.rank], digest)
        arrived = self._store.add(f"agree/{number}", 1)
        end, pause_s = time.monotonic() + timeout_s, 0.0005
        while arrived < self.ranks:
            failure = self.watch.failure()
            if failure is None and time.monotonic() > end:
                failure = self._missing(what, keys, timeout_s)
            if failure:
                self.fail(failure)
                raise RunError(f"rank {self.rank}, agreeing on the {what}: {failure}")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.02)
            arrived = self._store.add(f"agree/{number}", 0)
        for rank, key in enumerate(keys):
            other = self._store.get(key).decode()
            if other != digest:
                raise RunError(
                    f"rank {self.rank} holds {what} {digest}, rank {rank} holds {other}: all ranks "
                    "must hold one plan; let one rank plan and pass it on with ultraattn.share()"
                )

    def _missing(self, what: str, keys: list[str], timeout_s: float) -> str:
        missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
        names = ", ".join(map(str, missing))
        return self.watch.blame(
            f"rank{'s' if len(missing) > 1 else ''} {names} did not bring a {what} within "
            f"{timeout_s:g} s: every rank of the group must make its Attention, in the same order"
        )


def asides_on(device: torch.device) -> tuple[SideStream, ...]:
    """Streams beside the calling one: for merges of what is here, and of what is awaited."""
    return (SideStream(device), SideStream(device)) if device.type == "cuda" else ()


_sessions: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, Session]] = (
    weakref.WeakKeyDictionary()
)


def session_of(group: dist.ProcessGroup, transport: str = "auto") -> Session:
    """The session of a group: one for all plans, so that tags and buffers are shared."""
    found = _sessions.setdefault(group, {})
    if transport not in found:
        found[transport] = Session(group, transport)
    return found[transport]


def as_group(mesh_or_group: Any) -> dist.ProcessGroup:
    """A process group from a group, a one-dimensional device mesh, or None for the default group.

    Raises:
        InputError: no process group exists, or the mesh has several dimensions.
    """
    if not dist.is_initialized():
        raise InputError(
            "no process group: call torch.distributed.init_process_group first, under torchrun or "
            "in processes of your own"
        )
    if mesh_or_group is None:
        assert dist.group.WORLD is not None  # a default group exists
        return dist.group.WORLD
    if isinstance(mesh_or_group, dist.ProcessGroup):
        return mesh_or_group
    if hasattr(mesh_or_group, "get_group"):
        if mesh_or_group.ndim != 1:
            raise InputError(
                f"device mesh of {mesh_or_group.ndim} dimensions: expected one; pass the slice "
                "over which the sequence is sharded, such as mesh['cp']"
            )
        return mesh_or_group.get_group()  # type: ignore[no-any-return]
    raise InputError(
        f"mesh {type(mesh_or_group).__name__}: expected a ProcessGroup, a one-dimensional "
        "DeviceMesh, or None for the default group"
    )


def _store_of(group: dist.ProcessGroup, rank: int) -> Any:
    """The default store under a prefix of the group's own, new each time the group is made anew."""
    ranks = [dist.get_global_rank(group, r) for r in range(dist.get_world_size(group))]
    name = f"{group.group_name}:{ranks}"
    prefix = f"ultraattn/{hashlib.sha256(name.encode()).hexdigest()[:16]}"
    store = PrefixStore(prefix, dist.distributed_c10d._get_default_store())
    return PrefixStore(f"{store.add(f'sessions/{rank}', 1)}", store)
