"""Holds what the plans of one process group share: transport, workspace, watch, message tags."""

from __future__ import annotations

import hashlib
import time
import weakref
from typing import Any

import torch
import torch.distributed as dist

from ultraattn.errors import InputError, RunError
from ultraattn.runtime.transports import GlooTransport, Transport
from ultraattn.runtime.watch import Watch
from ultraattn.runtime.workspace import Workspace

MAX_TAG = 2**30


class Session:
    """One process group as plans see it. Made by every rank of the group, in the same order.

    It makes no process group and destroys none: the group is the caller's.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_world_size(group)
        self.device = torch.device("cpu")
        backend = dist.get_backend(group)
        if "gloo" not in backend:
            raise InputError(
                f"process group with backend {backend!r}: expected one that serves CPU tensors; "
                "use init_process_group('gloo') or 'cpu:gloo,cuda:nccl'"
            )
        self.transport: Transport = GlooTransport(group)
        self.workspace = Workspace(self.device)
        self._store = dist.PrefixStore(_prefix(group), _default_store())
        self.watch = Watch(self._store, self.rank, self.ranks)
        self._next_tag = 0
        self._agreements = 0
        self.trace: list[tuple[str, int]] | None = None
        """Where it is a list, every run appends (pass, task) in the order in which it runs them."""

    def tags(self, count: int) -> int:
        """The first of `count` message tags that no other call in flight uses."""
        if self._next_tag + count > MAX_TAG:
            self._next_tag = 0
        first = self._next_tag
        self._next_tag += count
        return first

    def agree(self, what: str, digest: str, timeout_s: float) -> None:
        """Returns when every rank of the group has called it with the same digest.

        Raises:
            RunError: on every rank, naming both digests, or the ranks that did not come.
        """
        number, self._agreements = self._agreements, self._agreements + 1
        self._store.set(f"agree/{number}/{self.rank}", digest)
        end = time.monotonic() + timeout_s
        others: dict[int, str] = {}
        while len(others) < self.ranks:
            for rank in range(self.ranks):
                key = f"agree/{number}/{rank}"
                if rank not in others and self._store.check([key]):
                    others[rank] = self._store.get(key).decode()
            failure = self.watch.failure()
            if failure:
                raise RunError(f"rank {self.rank}, agreeing on {what}: {failure}")
            if len(others) < self.ranks and time.monotonic() > end:
                missing = [rank for rank in range(self.ranks) if rank not in others]
                raise RunError(
                    f"rank {self.rank}: ranks {missing} did not bring their {what} within "
                    f"{timeout_s:g} s; every rank of the group must make its Attention, in the "
                    "same order"
                )
            if len(others) < self.ranks:
                time.sleep(0.002)
        for rank, other in sorted(others.items()):
            if other != digest:
                raise RunError(
                    f"rank {self.rank} holds {what} {digest}, rank {rank} holds {other}: all ranks "
                    "must hold one plan; let one rank plan and pass it on with ultraattn.share()"
                )


_sessions: weakref.WeakKeyDictionary[dist.ProcessGroup, Session] = weakref.WeakKeyDictionary()


def session_of(group: dist.ProcessGroup) -> Session:
    """The session of a group: one for all plans, so that tags and buffers are shared."""
    found = _sessions.get(group)
    if found is None:
        found = _sessions[group] = Session(group)
    return found


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
        return dist.group.WORLD  # type: ignore[no-any-return]
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


def _default_store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _prefix(group: dist.ProcessGroup) -> str:
    ranks = [dist.get_global_rank(group, rank) for rank in range(dist.get_world_size(group))]
    name = f"{group.group_name}:{ranks}"
    return f"ultraattn/{hashlib.sha256(name.encode()).hexdigest()[:16]}"
