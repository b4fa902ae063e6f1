"""Runs a plan with all its ranks in one process, on one device: whole tensors in and out.

For tests and for looking at a plan: every task runs as it would on a rank of its own, over a
`Loopback` in place of links. Ranks take turns on the device; the time says nothing.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor as Array

from ultraattn.errors import RunError
from ultraattn.masks import Mask
from ultraattn.plans.passes import Pass
from ultraattn.plans.plan import Plan
from ultraattn.plans.tensors import Tensor
from ultraattn.runtime.attention import mask_of
from ultraattn.runtime.execute import Execution
from ultraattn.runtime.merge import accumulate_dtype
from ultraattn.runtime.pieces import Between, Own
from ultraattn.runtime.session import Session
from ultraattn.runtime.steps import steps_of
from ultraattn.runtime.streams import SideStream
from ultraattn.runtime.tiles import Tiles
from ultraattn.runtime.transports.loopback import Loopback, LoopbackTransport
from ultraattn.runtime.workspace import Workspace


@dataclass
class _Now:
    task: str = ""
    waits_for: int = -1


class _Watch:
    """Names faults as `ultraattn.runtime.watch.Watch` does, without a store."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.now = _Now()

    @contextlib.contextmanager
    def calling(self, call: str) -> Iterator[None]:
        yield

    def failed(self, cause: BaseException) -> str:
        return f"rank {self._rank} failed in {self.now.task}: {type(cause).__name__}: {cause}"

    def explain(self, task: str, peer: int, error: BaseException) -> RunError:
        return RunError(f"rank {self._rank}, {task}, waiting for rank {peer}: {error}")


@dataclass
class _Session:
    """What `Execution` asks of a `ultraattn.runtime.session.Session`."""

    rank: int
    ranks: int
    device: torch.device
    transport: LoopbackTransport
    workspace: Workspace
    watch: _Watch
    trace: list[tuple[str, int]] | None = None
    asides: tuple[SideStream, ...] = ()
    failure: str = ""
    calls: int = field(default=0)

    def tags(self, count: int, batch: int) -> int:
        first, self.calls = self.calls, self.calls + count
        return first

    def fail(self, cause: str) -> None:
        self.failure = cause
        self.transport.abort()

    def refuse_if_failed(self) -> None:
        if self.failure:
            raise RunError(f"rank {self.rank} failed in an earlier call: {self.failure}")


class Together:
    """All ranks of one plan in this process.

    Args:
        plan: any plan.
        device: where its tensors are.
        mask: the mask again, where the plan could not save it.
        kernel: a kernel's name, or "auto".
        timeout_s: the longest wait of a rank for another.
    """

    def __init__(
        self,
        plan: Plan,
        device: torch.device | str = "cpu",
        *,
        mask: Mask | None = None,
        kernel: str = "auto",
        timeout_s: float = 60.0,
    ) -> None:
        self.plan = plan
        self.device = torch.device(device)
        self._timeout_s = timeout_s
        links = Loopback(plan.ranks)
        self.sessions = [
            _Session(
                rank,
                plan.ranks,
                self.device,
                links.transport(rank),
                Workspace(self.device),
                _Watch(rank),
            )
            for rank in range(plan.ranks)
        ]
        found, rank_plans = mask_of(plan, mask), [plan.for_rank(r) for r in range(plan.ranks)]
        self._tiles = [Tiles(rank_plan, found, kernel, self.device) for rank_plan in rank_plans]
        self._kept: list[Array | None] = [None] * plan.ranks
        self._steps = {
            pass_: [
                steps_of(pass_, rank_plan, tags=len(plan.pass_plan(pass_).program.tasks.rank))
                for rank_plan in rank_plans
            ]
            for pass_ in Pass
        }

    @torch.no_grad()
    def forward(self, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        """O (batch, heads, tokens, value_dim) and LSE (batch, heads, tokens) of whole tensors.

        Raises:
            RunError: a rank failed; the first to fail is named.
        """
        p = self.plan.problem
        owns = []
        for rank in range(self.plan.ranks):
            own = self._inputs(rank, {Tensor.Q: q, Tensor.K: k, Tensor.V: v})
            shape = (*own[Tensor.Q].shape[:3], p.value_dim)
            own[Tensor.O] = q.new_empty(shape)
            own[Tensor.LSE] = q.new_empty(shape[:3], dtype=accumulate_dtype(q.dtype))
            owns.append(own)
            kept = self._steps[Pass.FORWARD][rank].kept
            if kept.bytes:
                own[Between.KEPT] = kept.empty(q, len(q))
        self._run(Pass.FORWARD, owns)
        self._kept = [own.get(Between.KEPT) for own in owns]
        out = self.plan.unshard([own[Tensor.O] for own in owns], dim=2)
        return out, self.plan.unshard([own[Tensor.LSE] for own in owns], dim=2)

    @torch.no_grad()
    def backward(
        self, dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array
    ) -> tuple[Array, Array, Array]:
        """dQ, dK, dV of whole tensors, from the results of `forward`.

        Where the plan keeps inputs (`Plan.kept_bytes`), they are those of the last `forward`.
        """
        given = {
            Tensor.Q: q, Tensor.K: k, Tensor.V: v, Tensor.O: out, Tensor.LSE: lse, Tensor.DO: dout
        }  # fmt: skip
        grads = {Tensor.DQ: Tensor.Q, Tensor.DK: Tensor.K, Tensor.DV: Tensor.V}
        owns = []
        for rank in range(self.plan.ranks):
            own = self._inputs(rank, given)
            kept = self._kept[rank]
            if kept is not None:
                own[Between.KEPT] = kept
            own |= {grad: own[of].new_empty(own[of].shape) for grad, of in grads.items()}
            owns.append(own)
        self._run(Pass.BACKWARD, owns)
        dq, dk, dv = (
            self.plan.unshard([own[grad] for own in owns], dim=2, keys=grad.by_key)
            for grad in grads
        )
        return dq, dk, dv

    def _inputs(self, rank: int, whole: dict[Tensor, Array]) -> Own:
        return {
            tensor: self.plan.shard(x, rank, dim=2, keys=tensor.by_key)
            for tensor, x in whole.items()
        }

    def _run(self, pass_: Pass, owns: list[Own]) -> None:
        layouts = self.plan.q_layout, self.plan.kv_layout
        failures: list[tuple[int, Exception]] = []
        batch = int(owns[0][Tensor.Q].shape[0])

        def rank_runs(rank: int) -> None:
            try:
                Execution(
                    cast(Session, self.sessions[rank]), self._steps[pass_][rank], layouts,
                    owns[rank], batch, self._tiles[rank], self._timeout_s, str(pass_),
                ).run()  # fmt: skip
            except Exception as error:
                failures.append((rank, error))

        _in_threads(rank_runs, self.plan.ranks)
        if failures:
            raise failures[0][1]


def _in_threads(function: Callable[[int], Any], count: int) -> None:
    threads = [threading.Thread(target=function, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
