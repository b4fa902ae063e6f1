"""Captures a pass of a plan as a CUDA graph and replays it: one launch from the host for all tasks.

Tensors that come back at the same addresses get a graph that reads and writes them where they
stand. A caller whose tensors keep moving gets, after some calls, a graph over static tensors: they
are copied into these before a replay, and results out of them after. Until then calls run task by
task, which also fills the workspace and connects. So a graph holds no memory but for callers that
need copies, and captures move nothing: each rank makes them when it likes, since a replay and a run
exchange the same messages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor as Array

from ultraattn.plans.passes import Pass
from ultraattn.plans.tensors import Tensor
from ultraattn.runtime.pieces import Between, Own
from ultraattn.runtime.streams import calling_stream
from ultraattn.runtime.transports import Transport

Run = Callable[[Pass, Own, int], None]
Key = tuple[Pass, int, frozenset[Tensor | Between]]
Places = tuple[tuple[Tensor | Between, int, tuple[int, ...]], ...]

DIRECT_AFTER = 2
"""Calls with the same tensors at the same places after which they get a graph of their own."""
MOVING_AFTER = 16
"""Calls without a graph after which tensors are taken to move, and are copied."""
MOST_DIRECT = 16
"""Graphs for tensors where they stand."""
MOST_SEEN = 1024
"""Places that are remembered; a caller that never comes back to one costs no more than these."""

RESULTS: dict[Pass, tuple[Tensor | Between, ...]] = {
    Pass.FORWARD: (Tensor.O, Tensor.LSE, Between.KEPT),
    Pass.BACKWARD: (Tensor.DQ, Tensor.DK, Tensor.DV),
}


@dataclass
class _Captured:
    graph: torch.cuda.CUDAGraph
    static: Own
    """What it reads and writes in place of the caller's tensors; empty where it uses these."""
    bytes_sent: int
    bytes_received: int


class Replays:
    """Runs passes as captured graphs.

    A caller that comes back with tensors at the same places (a training loop does, for its memory
    is allocated alike in every step) gets a graph of its own that reads and writes them there.

    Args:
        run: gives what runs a pass on the current stream, on the tensors that it is given, for as
            long as its owner lives. What it allocates besides must live as long as this does.
        device: the CUDA device.
        transport: counts a replay's bytes, as it counts those of a run.
    """

    def __init__(
        self, run: Callable[[], Run | None], device: torch.device, transport: Transport
    ) -> None:
        self._run_of = run
        self._transport = transport
        self._device = device
        self._captured: dict[Key, _Captured] = {}
        self._without: dict[Key, int] = {}
        self._direct: dict[tuple[Key, Places], _Captured] = {}
        self._seen: dict[tuple[Key, Places], int] = {}
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._last = calling_stream(device)
        """The stream of the call before: graphs share buffers, so calls follow one another."""

    def __call__(self, pass_: Pass, own: Own, batch: int) -> None:
        """As `run`: results are written into the tensors of `own`."""
        if torch.cuda.is_current_stream_capturing():
            self._run(pass_, own, batch)
            return
        here = calling_stream(self._device)
        if here is not self._last:
            here.wait_stream(self._last)
            self._last = here
        key = (pass_, batch, frozenset(own))
        found = self._directly(key, own) or self._copying(key, own)
        if found is None:
            self._run(pass_, own, batch)
            return
        for tensor, place in found.static.items():
            if tensor not in RESULTS[pass_]:
                place.copy_(own[tensor])
        found.graph.replay()
        if found.static:
            for tensor in RESULTS[pass_]:
                if tensor in own:
                    own[tensor].copy_(found.static[tensor])
        self._transport.bytes_sent += found.bytes_sent
        self._transport.bytes_received += found.bytes_received

    def _run(self, pass_: Pass, own: Own, batch: int) -> None:
        run = self._run_of()
        assert run is not None  # the owner is in a call
        run(pass_, own, batch)

    def _directly(self, key: Key, own: Own) -> _Captured | None:
        """The graph of the tensors where they stand, once they were seen there often enough."""
        places = tuple((tensor, x.data_ptr(), x.stride()) for tensor, x in own.items())
        found = self._direct.get((key, places))
        if found is not None or len(self._seen) > MOST_SEEN:
            return found
        times = self._seen[key, places] = self._seen.get((key, places), 0) + 1
        if times < DIRECT_AFTER or len(self._direct) >= MOST_DIRECT:
            return None
        found = self._direct[key, places] = self._capture(key, own, {})
        self._without[key] = 0
        return found

    def _copying(self, key: Key, own: Own) -> _Captured | None:
        """The graph over static tensors, once calls of the key have had none often enough."""
        found = self._captured.get(key)
        if found is not None:
            return found
        calls = self._without[key] = self._without.get(key, 0) + 1
        if calls <= MOVING_AFTER:
            return None
        static = {tensor: _in_memory_order(x) for tensor, x in own.items()}
        found = self._captured[key] = self._capture(key, own, static)
        return found

    def _capture(self, key: Key, own: Own, static: Own) -> _Captured:
        """A graph of the pass on `static`, or on `own`; an earlier call has run it."""
        pass_, batch, _ = key
        links = self._transport
        before = links.bytes_sent, links.bytes_received
        self._stream.wait_stream(self._last)
        with torch.cuda.stream(self._stream):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                self._run(pass_, static or own, batch)
        self._last.wait_stream(self._stream)
        moved = links.bytes_sent - before[0], links.bytes_received - before[1]
        links.bytes_sent, links.bytes_received = before
        return _Captured(graph, static, *moved)


def _in_memory_order(x: Array) -> Array:
    """An empty tensor like `x`, (batch, tokens, heads, width) in memory where it has a width."""
    if x.ndim < 4:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    batch, heads, tokens, width = x.shape
    return x.new_empty((batch, tokens, heads, width)).transpose(1, 2)
