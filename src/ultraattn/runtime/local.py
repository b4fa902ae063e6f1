"""Starts ranks as processes of this machine, runs functions on all of them, collects results."""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import multiprocessing.connection
import os
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from ultraattn.errors import InputError, RunError

PRELOAD = ["ultraattn.runtime.local", "ultraattn.runtime.attention", "torch._dynamo"]
"""What the fork server imports once, so that a rank starts in a fraction of a second."""
START_S = 120.0
"""Seconds that ranks get to start, and to join their group."""
CLOSE_S = 2.0
"""Seconds that ranks get to end by themselves before they are killed."""


class LocalRanks:
    """`ranks` processes that form one gloo process group, and stay until `close`.

    They end with this process, however it ends.

    Args:
        ranks: how many.
        threads: torch threads of each; 1, so that ranks which share cores do not fight.
        timeout_s: the longest that `run` waits for all ranks.

    Raises:
        RunError: a process did not start.
    """

    def __init__(self, ranks: int, *, threads: int = 1, timeout_s: float = 600.0) -> None:
        if ranks < 1:
            raise InputError(f"ranks {ranks}: expected at least 1 local process")
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self.ranks = ranks
        self._timeout_s = timeout_s
        self._late: list[int] = []
        # The store lives here, so that it outlives any rank.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(theirs, rank, ranks, self._store.port, threads, max(START_S, timeout_s)),
                daemon=True,
                name=f"ultraattn-rank-{rank}",
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        try:
            _raise_failures(self._collect(START_S))
        except BaseException:
            self.close()
            raise

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """``function(rank, *args)`` on every rank; results in order of rank.

        Raises:
            RunError: some ranks raised, died, or did not answer in time; all are named.
        """
        results = self.attempt(function, *args)
        _raise_failures(results)
        return results

    def attempt(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """As `run`, but a rank that failed gives a `Failure` in place of its result.

        Raises:
            RunError: ranks did not answer an earlier call in time, and may answer it still.
        """
        if self._late:
            raise RunError(
                f"ranks {self._late} did not answer an earlier call in time; close LocalRanks "
                "and start others"
            )
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send((function, args))
        return self._collect(self._timeout_s)

    def _collect(self, timeout_s: float) -> list[Any]:
        results: list[Any] = [None] * self.ranks
        waiting: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        end = time.monotonic() + timeout_s
        while waiting:
            left = end - time.monotonic()
            ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, left))
            if not ready:
                self._late = sorted(waiting.values())
                for rank in self._late:
                    results[rank] = Failure("no answer", f"none within {timeout_s:g} s")
                break
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    results[rank] = self._pipes[rank].recv()
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join(timeout=5)
                    code = self._processes[rank].exitcode
                    results[rank] = Failure("died", f"its process ended with exit code {code}")
        return results

    def close(self) -> None:
        """Ends all ranks; those that do not end by themselves are killed."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
            pipe.close()
        end = time.monotonic() + CLOSE_S
        for rank, process in enumerate(self._processes):
            process.join(timeout=0.0 if rank in self._late else max(0.0, end - time.monotonic()))
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


def _raise_failures(results: Sequence[Any]) -> None:
    failures = [
        f"rank {rank}: {result}"
        for rank, result in enumerate(results)
        if isinstance(result, Failure)
    ]
    if failures:
        raise RunError("\n".join(failures))


def _serve(
    pipe: Connection, rank: int, ranks: int, port: int, threads: int, timeout_s: float
) -> None:
    """The life of a rank: joins the group, then runs what it is sent."""
    import torch
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    try:
        dist.init_process_group(
            "gloo",
            store=TCPStore("127.0.0.1", port, is_master=False),
            rank=rank,
            world_size=ranks,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
    except Exception as error:
        pipe.send(_failure(error))
        return
    pipe.send(None)
    while True:
        try:
            order = pipe.recv()
        except EOFError:
            break
        except Exception as error:  # what was sent cannot be read here
            pipe.send(_failure(error))
            continue
        if order is None:
            break
        function, args = order
        try:
            result: Any = function(rank, *args)
        except Exception as error:
            result = _failure(error)
        try:
            pipe.send(result)
        except OSError:
            break
        except Exception as error:  # a result that cannot be sent
            pipe.send(_failure(error))
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


def _failure(error: Exception) -> Failure:
    return Failure(type(error).__name__, str(error), traceback.format_exc())


def _end_with_parent() -> None:
    """Ends this process once the one that started it is gone, whatever this one does then."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
