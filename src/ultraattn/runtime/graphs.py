"""Captures a pass of a plan as a CUDA graph and replays it: one launch from the host for all tasks.

The tensors of a call are copied into static ones before a replay, and results out of them after.
The first call of a (pass, batch) runs twice beside capture: once to warm up (compile, fill the
workspace, connect), and once as the replay that gives the result. All ranks do alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor as Array

from ultraattn.plans.passes import Pass
from ultraattn.plans.tensors import Tensor
from ultraattn.runtime.transports import Transport

Run = Callable[[Pass, dict[Tensor, Array], int], None]
Key = tuple[Pass, int, frozenset[Tensor]]

RESULTS = {
    Pass.FORWARD: (Tensor.O, Tensor.LSE),
    Pass.BACKWARD: (Tensor.DQ, Tensor.DK, Tensor.DV),
}


@dataclass
class _Captured:
    graph: torch.cuda.CUDAGraph
    static: dict[Tensor, Array]
    """What the graph reads and writes."""
    done: torch.cuda.Event
    """The end of the last replay: the next one starts after it, on whatever stream."""
    bytes_sent: int
    bytes_received: int


class Replays:
    """Runs passes as captured graphs.

    Args:
        run: runs a pass on the current stream, on the tensors that it is given. What it allocates
            besides must live as long as this does.
        device: the CUDA device.
        transport: counts a replay's bytes, as it counts those of a run.
    """

    def __init__(self, run: Run, device: torch.device, transport: Transport) -> None:
        self._run = run
        self._transport = transport
        self._device = device
        self._captured: dict[Key, _Captured] = {}
        # Warm-up and capture share a stream: recent NCCL breaks otherwise.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, pass_: Pass, own: dict[Tensor, Array], batch: int) -> None:
        """As `run`: results are written into the tensors of `own`."""
        if torch.cuda.is_current_stream_capturing():
            self._run(pass_, own, batch)
            return
        key = (pass_, batch, frozenset(own))
        found = self._captured.get(key)
        if found is None:
            found = self._captured[key] = self._capture(pass_, own, batch)
        here = torch.cuda.current_stream(self._device)
        here.wait_event(found.done)
        for tensor, static in found.static.items():
            if tensor not in RESULTS[pass_]:
                static.copy_(own[tensor])
        found.graph.replay()
        for tensor in RESULTS[pass_]:
            own[tensor].copy_(found.static[tensor])
        found.done.record(here)
        self._transport.bytes_sent += found.bytes_sent
        self._transport.bytes_received += found.bytes_received

    def _capture(self, pass_: Pass, own: dict[Tensor, Array], batch: int) -> _Captured:
        static = {tensor: _in_memory_order(x) for tensor, x in own.items()}
        links = self._transport
        before = links.bytes_sent, links.bytes_received
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            for tensor, place in static.items():
                place.copy_(own[tensor])
            self._run(pass_, static, batch)
            graph = torch.cuda.CUDAGraph()
            self._stream.synchronize()
            links.bytes_sent, links.bytes_received = before
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                self._run(pass_, static, batch)
        here.wait_stream(self._stream)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(here)
        moved = links.bytes_sent - before[0], links.bytes_received - before[1]
        links.bytes_sent, links.bytes_received = before
        return _Captured(graph, static, done, *moved)


def _in_memory_order(x: Array) -> Array:
    """An empty tensor like `x`, (batch, tokens, heads, width) in memory where it has a width."""
    if x.ndim < 4:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    batch, heads, tokens, width = x.shape
    return x.new_empty((batch, tokens, heads, width)).transpose(1, 2)
