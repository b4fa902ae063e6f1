"""Starts ranks as processes of this machine, runs functions on all of them, collects results."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import time
import traceback
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from ultraattn.errors import InputError, RunError

PRELOAD = ["ultraattn.runtime.local", "ultraattn.runtime.attention", "torch._dynamo"]
"""What the fork server imports once, so that a rank starts in a fraction of a second."""


class LocalRanks:
    """`ranks` processes that form one gloo process group, and stay until `close`.

    Args:
        ranks: how many.
        threads: torch threads of each; 1, so that ranks which share cores do not fight.
        timeout_s: the longest that `run` waits for all ranks.
    """

    def __init__(self, ranks: int, *, threads: int = 1, timeout_s: float = 600.0) -> None:
        if ranks < 1:
            raise InputError(f"ranks {ranks}: expected at least 1 local process")
        import torch.distributed as dist

        self.ranks = ranks
        self._timeout_s = timeout_s
        # The store lives here, so that it outlives any rank.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._pipes = []
        self._processes = []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(theirs, rank, ranks, self._store.port, threads, timeout_s),
                daemon=True,
                name=f"ultraattn-rank-{rank}",
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._collect()

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """``function(rank, *args)`` on every rank; results in order of rank.

        Raises:
            RunError: some ranks raised, died, or did not answer in time; all are named.
        """
        results = self.attempt(function, *args)
        failures = [
            f"rank {rank}: {result}"
            for rank, result in enumerate(results)
            if isinstance(result, Failure)
        ]
        if failures:
            raise RunError("\n".join(failures))
        return results

    def attempt(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """As `run`, but a rank that failed gives a `Failure` in place of its result."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send((function, args))
        return self._collect()

    def _collect(self) -> list[Any]:
        results: list[Any] = [None] * self.ranks
        open_pipes = {self._pipes[rank]: rank for rank in range(self.ranks)}
        end = time.monotonic() + self._timeout_s
        while open_pipes:
            left = end - time.monotonic()
            ready = multiprocessing.connection.wait(list(open_pipes), timeout=max(0.0, left))
            if not ready:
                for rank in open_pipes.values():
                    results[rank] = Failure("no answer", f"none within {self._timeout_s:g} s")
                break
            for pipe in ready:
                rank = open_pipes.pop(pipe)  # type: ignore[call-overload]
                try:
                    results[rank] = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join(timeout=5)
                    code = self._processes[rank].exitcode
                    results[rank] = Failure("died", f"its process ended with exit code {code}")
        return results

    def close(self) -> None:
        """Ends all ranks."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
                pipe.close()
        for process in self._processes:
            process.join(timeout=2)
            if process.is_alive():
                process.kill()
                process.join(timeout=5)

    def __enter__(self) -> LocalRanks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Failure:
    """What a rank gives when it failed: the error's type and text."""

    def __init__(self, kind: str, text: str, trace: str = "") -> None:
        self.kind = kind
        self.text = text
        self.trace = trace

    def __repr__(self) -> str:
        return f"{self.kind}: {self.text}"


def raised(results: Sequence[Any]) -> list[str]:
    """The texts of all failures among results."""
    return [repr(result) for result in results if isinstance(result, Failure)]


def _serve(
    pipe: multiprocessing.connection.Connection,
    rank: int,
    ranks: int,
    port: int,
    threads: int,
    timeout_s: float,
) -> None:
    """The life of a rank: joins the group, then runs what it is sent."""
    import datetime

    import torch
    import torch.distributed as dist

    torch.set_num_threads(threads)
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group(
            "gloo",
            store=store,
            rank=rank,
            world_size=ranks,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
        pipe.send(None)
    except Exception as error:
        pipe.send(Failure(type(error).__name__, str(error), traceback.format_exc()))
        return
    while True:
        try:
            order = pipe.recv()
        except EOFError:
            break
        if order is None:
            break
        function, args = order
        try:
            result: Any = function(rank, *args)
        except Exception as error:
            result = Failure(type(error).__name__, str(error), traceback.format_exc())
        pipe.send(result)
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
