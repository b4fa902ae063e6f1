"""Measures attention on GPUs into JSON files: kernels, merges, launches, plans and their ideal.

    python benchmarks/gpu.py kernels --out benchmarks/results
    python benchmarks/gpu.py plans --ranks 2 --out benchmarks/results
    python benchmarks/gpu.py peers --ranks 2 --parts dense,trace,sparse --out benchmarks/results

`kernels` needs one GPU, `plans` and `peers` (`gpu_peers.py`) as many as ranks. Every repeat is
kept, in milliseconds; a cell's time is the median, of the slowest rank. The ideal of a cell is the
time of cuDNN on one GPU for the whole problem over the number of ranks, measured in the same run.
A cell that fails keeps its error.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import platform
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

import ultraattn as ua
from ultraattn.cluster import Cluster
from ultraattn.masks.grid import OPEN_HI, BlockKind
from ultraattn.runtime.kernels import KERNELS, Piece, fa4
from ultraattn.runtime.kernels.standin import stand_in
from ultraattn.runtime.merge import merge_partials

DEVICE = "cuda"
ON_CUDA = ("cudnn", "flash2", "sparse", "fa4")
WINDOW = 4096
PEAK_TFLOPS = 990.0
"""Dense bf16 of an H200 by its datasheet; a figure above it is an error of measurement."""


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "gpus": torch.cuda.device_count(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "python": platform.python_version(),
        "flash-attn-4": fa4.missing() or fa4.VERSIONS,
        "command": " ".join(["python", *sys.argv]),
    }


def draw(heads: int, tokens: int, dim: int, seed: int) -> torch.Tensor:
    """(1, heads, tokens, dim), tokens first in memory, random."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    shape = (1, tokens, heads, dim)
    x = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, generator=generator)
    return x.transpose(1, 2)


def timed(run: Callable[[], Any], repeats: int = 10, warm: int = 6) -> list[float]:
    """Milliseconds of each of `repeats` runs, by events."""
    for _ in range(warm):
        run()
    marks = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(repeats)]
    for start, stop in marks:
        start.record()
        run()
        stop.record()
    torch.cuda.synchronize()
    return [round(start.elapsed_time(stop), 4) for start, stop in marks]


def captured(run: Callable[[], Any]) -> Callable[[], Any]:
    """`run` as the replay of a graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def rate(tflop: float, ms: list[float]) -> float:
    """TFLOP/s at the median; refuses what the hardware cannot do."""
    found = tflop / statistics.median(ms) * 1e3
    if found > PEAK_TFLOPS:
        raise ValueError(f"{found:.0f} TFLOP/s is above the hardware's {PEAK_TFLOPS:.0f}")
    return round(found, 1)


def host_us(run: Callable[[], Any], repeats: int = 30) -> list[float]:
    """Microseconds of the host in each call, on an idle device."""
    found = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        found.append(round((time.perf_counter() - start) * 1e6, 1))
    return found


def attempt(
    cells: list[dict[str, Any]], cell: dict[str, Any], run: Callable[[], dict[str, Any]]
) -> None:
    """Adds a cell with what `run` found, or why it did not."""
    try:
        cells.append(cell | run())
    except Exception as error:
        cells.append(cell | {"not_measured": f"{type(error).__name__}: {error}"[:300]})
    torch.cuda.empty_cache()


# One GPU


def kernel_cells() -> Iterator[dict[str, Any]]:
    """Every kernel on rectangles and windows, forward and backward, as graph replays."""
    shapes: list[tuple[int, int, int, int, int | None]] = []
    shapes += [(32, 32, n, n, band) for n in (16384, 65536) for band in (WINDOW - 1, OPEN_HI, None)]
    shapes += [(32, 32, n, n, band) for n in (8192, 4096, 2048, 1024) for band in (None, OPEN_HI)]
    shapes += [(32, 8, 16384, 16384, band) for band in (None, OPEN_HI, WINDOW - 1)]
    shapes += [(32, 32, 2048, 8192, None), (32, 32, 8192, 2048, None), (32, 32, 512, 4096, None)]
    shapes += [(1, 1, 16384, 16384, None), (1, 1, 1024, 1024, None)]
    on_cuda = [kernel for kernel in KERNELS if kernel.name in ON_CUDA]
    for shape, kernel in itertools.product(shapes, on_cuda):
        heads, kv_heads, rows, cols, hi = shape
        cell = {
            "kernel": kernel.name, "heads": heads, "kv_heads": kv_heads, "q": rows, "kv": cols,
            "causal": hi is not None, "window": None if hi in (None, OPEN_HI) else WINDOW,
        }  # fmt: skip
        cells: list[dict[str, Any]] = []
        attempt(cells, cell, functools.partial(kernel_times, kernel, *shape))
        yield cells[0]


def kernel_times(
    kernel: Any, heads: int, kv_heads: int, rows: int, cols: int, hi: int | None
) -> dict[str, Any]:
    """One kernel on one rectangle of head_dim 128: full, or the band 0 <= i - j <= hi."""
    q, dout = draw(heads, rows, 128, 0), draw(heads, rows, 128, 3)
    k, v = draw(kv_heads, cols, 128, 1), draw(kv_heads, cols, 128, 2)
    index = tuple(head * kv_heads // heads for head in range(heads))
    piece = Piece(k, v, index)
    if hi is not None:
        piece = Piece(k, v, index, BlockKind.BAND, 0, hi)
    why = kernel.refusal(q, piece, False)
    if why is not None:
        return {"not_measured": why}
    out, lse = kernel.forward(q, piece, 0.088)
    delta = (out.float() * dout.float()).sum(-1)
    pairs = rows * cols
    if hi is not None:
        pairs = sum(min(i, cols - 1) - max(0, i - hi) + 1 for i in range(rows))
    tflop = 4 * pairs * 128 * heads / 1e12
    repeats = (10, 6) if tflop < 5 else (5, 2)
    forward = timed(captured(lambda: kernel.forward(q, piece, 0.088)), *repeats)
    backward = timed(captured(lambda: kernel.backward(dout, q, lse, delta, piece, 0.088)), *repeats)
    return {
        "forward_ms": forward,
        "forward_tflops": rate(tflop, forward),
        "backward_ms": backward,
        "backward_tflops": rate(2.5 * tflop, backward),
        "forward_eager_ms": timed(lambda: kernel.forward(q, piece, 0.088), *repeats),
    }


def merge_cells() -> list[dict[str, Any]]:
    """Merges of n parts in one pass, beside plain torch; the O that backward kernels ask for."""
    cells: list[dict[str, Any]] = []
    for tokens in (4096, 16384):
        outs = [draw(32, tokens, 128, i) for i in range(4)]
        lses = [torch.randn(1, 32, tokens, device=DEVICE) for _ in range(4)]
        for parts in (2, 3, 4):
            cell = {"merge_parts": parts, "tokens": tokens, "heads": 32}
            attempt(cells, cell, functools.partial(merge_times, outs[:parts], lses[:parts]))
        made = timed(functools.partial(stand_in, outs[0], lses[0], lses[1]))
        cells.append({"stand_in": True, "tokens": tokens, "heads": 32, "fused_ms": made})
    return cells


def merge_times(outs: list[torch.Tensor], lses: list[torch.Tensor]) -> dict[str, Any]:
    """One merge in one pass, and in plain torch (which float64 LSEs ask for)."""
    out, lse = torch.empty_like(outs[0]), torch.empty_like(lses[0])
    wide = [x.double() for x in lses]
    fused = timed(lambda: merge_partials(outs, lses, out=out, lse_out=lse))
    plain = timed(lambda: merge_partials(outs, wide, out=out, lse_out=lse))
    moved = (len(outs) + 1) * outs[0].numel() * 2
    rate_tbps = round(moved / statistics.median(fused) / 1e9, 2)
    return {"fused_ms": fused, "plain_ms": plain, "fused_TBps": rate_tbps}


def one_rank_cells() -> list[dict[str, Any]]:
    """The module on one rank: what it costs beside the bare kernel, with and without a graph."""
    cells: list[dict[str, Any]] = []
    for tokens, graph in itertools.product((1024, 8192, 32768), (False, True)):
        cell = {"one_rank": True, "tokens": tokens, "graph": graph}
        attempt(cells, cell, functools.partial(one_rank_times, tokens, graph))
    return cells


def one_rank_times(tokens: int, graph: bool) -> dict[str, Any]:
    """Causal attention of 32 heads: the module, the bare kernel, and the host's part."""
    plan = ua.plan(
        ua.masks.causal(), seqlen=tokens, heads=32, head_dim=128, effort="instant",
        cluster=Cluster.load("h200").resize(nodes=1, gpus_per_node=1),
    )  # fmt: skip
    q, k, v = (draw(32, tokens, 128, i) for i in range(3))
    piece = Piece(k, v, tuple(range(32)), BlockKind.BAND, 0, OPEN_HI)
    attention = ua.Attention(plan, graph=graph)
    ms = timed(lambda: attention(q, k, v))
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(20):
        attention(q, k, v)
    host_s = (time.perf_counter() - start) / 20
    torch.cuda.synchronize()
    bare = timed(lambda: KERNELS[1].forward(q, piece, plan.problem.scale))
    return {"forward_ms": ms, "kernel_ms": bare, "host_us": round(host_s * 1e6, 1)}


# Several GPUs


def ideal_ms(
    heads: int, kv_heads: int, tokens: int, causal: bool, repeats: int
) -> dict[str, list[float]]:
    """cuDNN on the whole problem on one GPU: forward, and forward plus backward."""
    aten = torch.ops.aten
    q, dout = draw(heads, tokens, 128, 0), draw(heads, tokens, 128, 3)
    k, v = draw(kv_heads, tokens, 128, 1), draw(kv_heads, tokens, 128, 2)
    seed = torch.zeros((), dtype=torch.int64, device=DEVICE)

    def forward() -> Any:
        return aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, causal, False, scale=128**-0.5
        )

    def both() -> Any:
        out, lse, *_ = forward()
        rest = (seed, seed, None, None, None, tokens, tokens, 0.0, causal)
        return aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, lse, *rest, scale=128**-0.5
        )

    return {
        "forward": timed(captured(forward), repeats),
        "forward_backward": timed(captured(both), repeats),
    }


def slowest(ms: list[float]) -> list[float]:
    """Each repeat's time on the slowest rank."""
    table = torch.tensor(ms, device=DEVICE)
    dist.all_reduce(table, op=dist.ReduceOp.MAX)
    return [round(x, 4) for x in table.tolist()]


def plan_cell(plan: Any, rank: int, transport: str, graph: bool, repeats: int) -> dict[str, Any]:
    """Forward, and forward plus backward, of a plan on all ranks."""
    p = plan.problem
    attention = ua.Attention(plan, transport=transport, graph=graph, timeout_s=60)
    q, k, v, dout = (
        plan.shard(draw(heads, p.q_len, 128, i).transpose(1, 2), rank, dim=1).transpose(1, 2)
        for i, heads in enumerate((p.heads, p.kv_heads, p.kv_heads, p.heads))
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def forward() -> Any:
        with torch.no_grad():
            return attention(*leaves)

    def both() -> Any:
        return torch.autograd.grad(attention(*leaves), leaves, dout)

    torch.cuda.reset_peak_memory_stats()
    found: dict[str, Any] = {}
    for name, run in (("forward", forward), ("forward_backward", both)):
        run()
        torch.cuda.synchronize()
        dist.barrier()
        found[name] = slowest(timed(run, repeats))
    torch.cuda.synchronize()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(5):
        forward()
    found["host_us"] = round((time.perf_counter() - start) / 5 * 1e6, 1)
    torch.cuda.synchronize()
    found["peak_GiB"] = round(torch.cuda.max_memory_allocated() / 2**30, 3)
    return found


MASKS = {
    "causal": ua.masks.causal(),
    "full": ua.masks.full(),
    "strided": ua.masks.strided(),
    "global_local": ua.masks.global_local(),
    "star": ua.masks.star(),
    "streaming": ua.masks.streaming(),
    "window": ua.masks.sliding_window(4096),
}
CELLS = (
    ("causal", 32768, 32),
    ("causal", 8192, 32),
    ("full", 8192, 32),
    ("full", 32768, 32),
    ("causal", 32768, 8),
    ("causal", 8192, 8),
    ("causal", 131072, 8),
    ("strided", 65536, 32),
    ("global_local", 65536, 32),
    ("star", 65536, 32),
    ("streaming", 65536, 32),
    ("window", 65536, 32),
    ("full", 131072, 8),
)
"""(mask, tokens, key/value heads) of 32 heads of 128: the most valuable first."""
WAYS = (("symmetric", True), ("symmetric", False), ("nccl", False))
"""(transport, graph)."""


def measured(
    cell: dict[str, Any],
    strategy: str,
    cluster: Cluster,
    rank: int,
    way: tuple[str, bool],
    ideal: dict[str, float],
) -> dict[str, Any]:
    """A plan's times, its work over them, and how they stand to the ideal."""
    plan = ua.plan(
        MASKS[cell["mask"]], seqlen=cell["tokens"], heads=cell["heads"],
        kv_heads=cell["kv_heads"], head_dim=cell["head_dim"], strategy=strategy,
        cluster=cluster, effort="fast",
    )  # fmt: skip
    p = plan.problem
    found = plan_cell(plan, rank, *way, 3 if p.q_len > 65536 else 10)
    tflop = 4 * p.visible_pairs * p.head_dim / 1e12 / plan.ranks
    for name, work in (("forward", tflop), ("forward_backward", 3.5 * tflop)):
        found[f"{name}_tflops_per_gpu"] = rate(work, found[name])
        if ideal:
            found[f"{name}_over_ideal"] = round(statistics.median(found[name]) / ideal[name], 3)
    return found


def plans(rank: int, ranks: int, port: int, seconds: float, path: str, names: list[str]) -> None:
    """All cells of `plans` on one rank, until the time is over."""
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    torch.cuda.set_device(rank)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("nccl", init_method=address, rank=rank, world_size=ranks)
    end = time.monotonic() + seconds
    cells: list[dict[str, Any]] = []
    cluster = Cluster.load("h200").resize(nodes=1, gpus_per_node=ranks)
    for mask, tokens, kv_heads in CELLS:
        cell: dict[str, Any] = {
            "mask": mask, "tokens": tokens, "heads": 32, "kv_heads": kv_heads, "head_dim": 128
        }  # fmt: skip
        ideal: dict[str, float] = {}
        if mask in ("causal", "full"):
            one = ideal_ms(32, kv_heads, tokens, mask == "causal", 3 if tokens > 65536 else 10)
            ideal = {name: statistics.median(ms) / ranks for name, ms in one.items()}
            cell |= {"ideal_ms": ideal, "one_gpu_ms": one}
        for strategy, way in itertools.product(names, WAYS):
            late = torch.tensor(int(time.monotonic() > end), device=DEVICE)
            dist.broadcast(late, 0)
            if int(late):
                continue

            run = functools.partial(measured, cell, strategy, cluster, rank, way, ideal)
            attempt(cells, cell | {"strategy": strategy, "transport": way[0], "graph": way[1]}, run)
            if rank == 0:
                print(shown(cells[-1]), flush=True)
                whole = {"machine": machine(), "ranks": ranks, "cells": cells}
                Path(path).write_text(json.dumps(whole, indent=1) + "\n")
    dist.destroy_process_group()


def shown(cell: dict[str, Any]) -> dict[str, Any]:
    """A cell in a line: medians in place of repeats."""
    return {
        name: round(statistics.median(x), 4) if isinstance(x, list) else x
        for name, x in cell.items()
        if name not in ("one_gpu_ms", "heads", "head_dim")
    }


def kernels(path: str) -> None:
    """All cells of `kernels`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    cells: list[dict[str, Any]] = []
    sections: tuple[Callable[[], Iterable[dict[str, Any]]], ...] = (
        kernel_cells, merge_cells, one_rank_cells,
    )  # fmt: skip
    for section in sections:
        for cell in section():
            cells.append(cell)
            found = {"machine": machine(), "cells": cells}
            Path(path).write_text(json.dumps(found, indent=1) + "\n")
            print(shown(cell), flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("section", choices=("kernels", "plans", "peers"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--seconds", type=float, default=600.0, help="begin no cell later than this"
    )
    parser.add_argument("--strategies", default="tile,allgather,heads,zigzag,ring")
    parser.add_argument("--parts", default="dense,trace,sparse", help="of peers")
    parser.add_argument("--masks", default="", help="of peers: only these sparse masks")
    parser.add_argument("--out", default="benchmarks/results")
    options = parser.parse_args()
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    if options.section == "kernels":
        kernels(str(folder / "gpu_kernels.json"))
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    if options.section == "peers":
        import gpu_peers

        parts = options.parts.split(",")
        masks = options.masks.split(",") if options.masks else []
        args = (options.ranks, port, options.seconds, str(folder), parts, masks)
        torch.multiprocessing.spawn(gpu_peers.work, args, nprocs=options.ranks)
        return
    path = str(folder / f"gpu_plans_{options.ranks}.json")
    torch.multiprocessing.spawn(
        plans,
        (options.ranks, port, options.seconds, path, options.strategies.split(",")),
        nprocs=options.ranks,
    )


if __name__ == "__main__":
    main()
