"""Shows where a call's time goes on several GPUs: a timeline of one call, graph nodes, host time.

    python benchmarks/gpu_profile.py --ranks 2 --out benchmarks/results/gpu_profile_2.json

Causal, bfloat16, 32 heads of 128. For each rank: every kernel and copy of one call with its stream,
start and duration; the nodes of the captured graphs by kind; and the host's time by part.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import json
import os
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

import gpu
import ultraattn as ua
from ultraattn.cluster import Cluster
from ultraattn.runtime import graphs

KINDS = ("kernel", "memcpy", "memset", "host", "graph", "empty", "wait event", "record event",
         "semaphore signal", "semaphore wait", "alloc", "free", "memory operations")  # fmt: skip
"""CUgraphNodeType, in order."""


def node_kinds(graph: Any) -> dict[str, int]:
    """Nodes of a captured graph by kind."""
    driver = ctypes.CDLL("libcuda.so.1")
    raw, count = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t()
    driver.cuGraphGetNodes(raw, None, ctypes.byref(count))
    nodes = (ctypes.c_void_p * count.value)()
    driver.cuGraphGetNodes(raw, nodes, ctypes.byref(count))
    kinds: Counter[str] = Counter()
    for node in nodes:
        kind = ctypes.c_int()
        driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind))
        kinds[KINDS[kind.value] if kind.value < len(KINDS) else str(kind.value)] += 1
    return dict(sorted(kinds.items()))


def timeline(run: Callable[[], Any]) -> list[list[Any]]:
    """(name, stream, start us, duration us) of what the device does in the last of three calls."""
    from torch.profiler import ProfilerActivity, profile

    spans: list[list[Any]] = []
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        for _ in range(3):
            torch.cuda.synchronize()
            dist.barrier()
            torch.cuda.synchronize()
            time.sleep(0.002)
            run()
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        record.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            name = event["name"].replace("void ", "")[:70]
            spans.append([name, event["args"].get("stream"), event["ts"], event["dur"]])
    spans.sort(key=lambda span: span[2])
    if not spans:
        return spans
    starts = [i for i in range(1, len(spans)) if spans[i][2] - spans[i - 1][2] > 1800]
    last = spans[starts[-1] :] if starts else spans
    first = last[0][2]
    return [[n, s, round(t - first, 1), round(d, 1)] for n, s, t, d in last if "nccl" not in n]


class Clock:
    """Adds up what wrapped functions take on the host, call by call."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}

    def wrap(self, owner: Any, name: str, label: str) -> None:
        """Times `owner.name` from now on."""
        inner = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                took = round((time.perf_counter() - start) * 1e6, 1)
                self.times.setdefault(label, []).append(took)

        setattr(owner, name, timed)


def cell_of(rank: int, ranks: int, tokens: int, effort: str, made: list[Any]) -> dict[str, Any]:
    """The profile of one length on this rank."""
    plan = ua.plan(
        ua.masks.causal(), seqlen=tokens, heads=32, head_dim=128, effort=effort,
        cluster=Cluster.load("h200").resize(nodes=1, gpus_per_node=ranks),
    )  # fmt: skip
    attention = ua.Attention(plan, graph=True, timeout_s=60)
    whole = [gpu.draw(32, tokens, 128, i) for i in range(4)]
    *ins, dout = [
        plan.shard(x.transpose(1, 2), rank, dim=1).contiguous().transpose(1, 2) for x in whole
    ]
    leaves = [x.requires_grad_() for x in ins]
    del whole

    def forward() -> Any:
        with torch.no_grad():
            return attention(*leaves)

    def both() -> Any:
        out = attention(*leaves)
        return (out, *torch.autograd.grad(out, leaves, dout))

    for one in (forward, both):
        for _ in range(8):
            one()
        torch.cuda.synchronize()
    cell: dict[str, Any] = {
        "rank": rank, "tokens": tokens, "transport": attention._session.transport.name,
        "graphs": [node_kinds(graph) for graph in made],
    }  # fmt: skip
    made.clear()
    for name, one in (("forward", forward), ("both", both)):
        dist.barrier()
        cell[f"{name}_ms"] = gpu.timed(one, 20, warm=4)
        clock, totals = Clock(), []
        timed = (
            (ua.Attention, "run_forward"), (ua.Attention, "run_backward"),
            (graphs.Replays, "__call__"), (torch.cuda.CUDAGraph, "replay"),
            (torch.autograd, "grad"),
        )  # fmt: skip
        saved = [getattr(owner, label) for owner, label in timed]
        for owner, label in timed:
            clock.wrap(owner, label, label)
        for _ in range(12):
            torch.cuda.synchronize()
            dist.barrier()
            torch.cuda.synchronize()
            start = time.perf_counter()
            one()
            totals.append(round((time.perf_counter() - start) * 1e6, 1))
        for (owner, label), inner in zip(timed, saved, strict=True):
            setattr(owner, label, inner)
        cell[f"{name}_host_us"] = {"total": totals, **clock.times}
        cell[f"{name}_timeline"] = timeline(one)
    return cell


def work(
    rank: int, ranks: int, port: int, out: str, tokens: list[int], effort: str, one_gpu: bool
) -> None:
    """Every cell on one rank."""
    faulthandler.dump_traceback_later(240, exit=True)
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    if one_gpu:
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    torch.cuda.set_device(0 if one_gpu else rank)
    dist.init_process_group(
        "gloo" if one_gpu else "nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank,
        world_size=ranks,
    )  # fmt: skip
    made: list[Any] = []
    graph_class = torch.cuda.CUDAGraph

    class Keeping(graph_class):  # type: ignore[misc,valid-type]
        def __new__(cls, keep_graph: bool = True) -> Any:
            made.append(super().__new__(cls, True))
            return made[-1]

        def __init__(self) -> None:
            torch._C._CUDAGraph.__init__(self, True)

    torch.cuda.CUDAGraph = Keeping  # type: ignore[misc]
    cells = [cell_of(rank, ranks, length, effort, made) for length in tokens]
    gathered: list[Any] = [None] * ranks
    dist.all_gather_object(gathered, cells)
    if rank == 0:
        found = {"machine": gpu.machine(), "ranks": ranks, "effort": effort, "one_gpu": one_gpu}
        Path(out).write_text(json.dumps({**found, "cells": gathered}) + "\n")
        for per_rank in gathered:
            for cell in per_rank:
                print(brief(cell), flush=True)
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


def brief(cell: dict[str, Any]) -> str:
    """A cell for people."""
    lines = [f"== rank {cell['rank']}, {cell['tokens']} tokens, {cell['transport']}"]
    lines += [f"graph {g}" for g in cell["graphs"]]
    for name in ("forward", "both"):
        lines.append(f"{name} ms {sorted(cell[f'{name}_ms'])[len(cell[f'{name}_ms']) // 2]}")
        for label, times in cell[f"{name}_host_us"].items():
            lines.append(f"  host {label}: {times}")
        for span in cell[f"{name}_timeline"]:
            lines.append(f"  {span[2]:>9} {span[3]:>8} s{span[1]} {span[0]}")
    return "\n".join(lines)


def main() -> None:
    """Reads the options, starts the ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", default="gpu_profile.json")
    parser.add_argument("--tokens", default="8192,32768")
    parser.add_argument("--effort", default="normal")
    parser.add_argument("--one-gpu", action="store_true", help="all ranks share the first GPU")
    given = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    tokens = [int(x) for x in given.tokens.split(",")]
    args = (given.ranks, port, given.out, tokens, given.effort, given.one_gpu)
    torch.multiprocessing.spawn(work, args, nprocs=given.ranks)


if __name__ == "__main__":
    main()
