"""Times the `sparse` kernel and the ranks of sparse plans on one GPU, into JSON files.

    python benchmarks/gpu_sparse.py tune --out benchmarks/results
    python benchmarks/gpu_sparse.py ranks --out benchmarks/results

tune: full squares of 8,192 tokens (and a causal one), by head_dim and kernel: every size in `TRIED`
that compiles and gives what the first does. Processes compile side by side, then one measures.

ranks: plans for two ranks, each rank's tasks alone as a graph, its messages packed but not sent:
what kernels, merges, packs and launches of a rank take, without links. Beside it half of the time
of the plan for one rank, in the same run.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_masks import documents

import gpu
import ultraattn as ua
from ultraattn.cluster import Cluster
from ultraattn.masks.grid import OPEN_HI, OPEN_LO, BlockKind
from ultraattn.plans.passes import Pass
from ultraattn.plans.tensors import Tensor
from ultraattn.runtime.execute import Execution
from ultraattn.runtime.kernels import sparse
from ultraattn.runtime.kernels.lists import Cell
from ultraattn.runtime.kernels.sparse import BlockSet, Extent, Place, Sizes
from ultraattn.runtime.rehearsal import _Silence
from ultraattn.runtime.together import Together

TOKENS = 8192
HEADS = {64: 32, 128: 32, 256: 16}
TRIED = {
    ("forward", 64): [
        (128, 64, 4, 3), (128, 64, 4, 4), (128, 128, 4, 2), (64, 64, 4, 3), (64, 128, 4, 3),
        (128, 128, 8, 3),
    ],
    ("forward", 128): [
        (64, 64, 4, 3), (64, 64, 4, 2), (128, 64, 8, 3), (128, 128, 8, 2), (128, 128, 8, 3),
        (128, 64, 4, 2), (64, 128, 4, 3), (64, 32, 4, 3), (64, 32, 4, 4),
    ],
    ("forward", 256): [(128, 64, 8, 2), (64, 32, 4, 2), (128, 32, 8, 3)],
    ("dq", 64): [(64, 64, 4, 3), (64, 64, 4, 2), (128, 64, 4, 2), (64, 128, 4, 2)],
    ("dq", 128): [(128, 64, 8, 3), (64, 64, 4, 2), (128, 128, 8, 2)],
    ("dq", 256): [(128, 32, 8, 2), (64, 32, 4, 2)],
    ("dkv", 64): [(64, 64, 4, 2), (64, 64, 4, 3), (128, 128, 8, 2), (128, 32, 4, 3)],
    ("dkv", 128): [(64, 64, 4, 3), (64, 64, 4, 2), (64, 128, 4, 2)],
    ("dkv", 256): [(64, 64, 8, 2), (64, 32, 8, 2)],
}  # fmt: skip
FLOP = {"forward": 4, "dq": 6, "dkv": 8}
"""Of matrix products that a kernel makes, per pair and unit of head_dim."""


@functools.cache
def tensors(dim: int) -> Any:
    """q, k, v, dout, lse, delta."""
    q, k, v, dout = (gpu.draw(HEADS[dim], TOKENS, dim, i) for i in range(4))
    lse = torch.zeros(q.shape[:3], device=gpu.DEVICE)
    return q, k, v, dout, lse + 10.0, lse


def work(which: str, dim: int, causal: bool = False) -> Callable[[], tuple[torch.Tensor, ...]]:
    """One kernel on a square of all tokens."""
    q, k, v, dout, lse, delta = tensors(dim)
    heads, scale = q.shape[1], dim**-0.5
    kind = BlockKind.BAND if causal else BlockKind.FULL
    extent = Extent(TOKENS, (0, heads))
    cell = Cell(0, 0, (0, heads), kind, 0 if causal else OPEN_LO, OPEN_HI)
    blocks = BlockSet((extent,), (extent,), (cell,), 1, q.device)
    to = tuple(torch.empty_like(q) for _ in range(2))

    def run() -> tuple[torch.Tensor, ...]:
        if which == "forward":
            sparse.forward_set(blocks, [q], [(k, v)], [Place(0, (0, heads), (to[0], lse))], scale)
            return to[:1]
        dq = [Place(0, (0, heads), to[:1])] if which == "dq" else []
        dkv = [Place(0, (0, heads), to)] if which == "dkv" else []
        sparse.backward_set(blocks, [dout], [q], [lse], [delta], [(k, v)], dq, dkv, scale)
        return to[: 1 + (which == "dkv")]

    return run


def compile_some(cells: list[tuple[str, int, tuple[int, ...]]]) -> None:
    """Compiles kernels into the cache on disk."""
    for which, dim, size in cells:
        sparse.SIZES[which, dim] = Sizes(*size)
        try:
            work(which, dim)()
        except Exception as error:
            print(which, dim, size, type(error).__name__, str(error)[:80], flush=True)


def tune(path: Path, processes: int) -> None:
    """Every size; the fastest of each kernel and head_dim last."""
    cells = [(which, dim, size) for (which, dim), some in TRIED.items() for size in some]
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(target=compile_some, args=(cells[i::processes],)) for i in range(processes)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    found: list[dict[str, Any]] = []
    first: dict[tuple[str, int, bool], Any] = {}
    for which, dim, size in cells:
        sparse.SIZES[which, dim] = Sizes(*size)
        cell: dict[str, Any] = {"kernel": which, "head_dim": dim, "size": size}
        try:
            for name, causal in (("full", False), ("causal", True)):
                run = work(which, dim, causal)
                got = [x.clone() for x in run()]
                known = first.setdefault((which, dim, causal), got)
                worst = max(
                    float((a.float() - b.float()).norm() / b.float().norm())
                    for a, b in zip(got, known, strict=True)
                )
                ms = gpu.timed(gpu.captured(run), 6, 3)
                flop = FLOP[which] * TOKENS**2 * dim * HEADS[dim] / 1e12 / (2 if causal else 1)
                cell |= {
                    name: {"ms": ms, "tflops": gpu.rate(flop, ms), "difference": round(worst, 5)}
                }
        except Exception as error:
            cell["failed"] = f"{type(error).__name__}: {error}"[:200]
        found.append(cell)
        shown = {k: (v["tflops"], v["difference"]) for k, v in cell.items() if isinstance(v, dict)}
        print(which, dim, size, shown or cell.get("failed"), flush=True)
        path.write_text(json.dumps({"machine": gpu.machine(), "cells": found}, indent=1) + "\n")
    for which, dim in TRIED:
        some = [c for c in found if (c["kernel"], c["head_dim"]) == (which, dim) and "full" in c]
        best = max(some, key=lambda c: c["full"]["tflops"], default=None)
        if best:
            print("best", which, dim, best["size"], best["full"]["tflops"], flush=True)


CELLS = [
    (name, tokens, heads)
    for tokens, heads in ((16384, 32), (16384, 8), (65536, 32))
    for name in ("window", "document", "global_local", "strided", "star", "streaming")
]
CHUNKS = {"window": 16, "global_local": 16, "document": 32}


def rank_ms(name: str, tokens: int, heads: int, ranks: int) -> list[list[list[float]]]:
    """Milliseconds of each rank's forward and backward pass, without its peers."""
    masks = {
        "window": ua.masks.sliding_window(4096),
        "document": ua.masks.document(documents(tokens)),
        "global_local": ua.masks.global_local(),
        "strided": ua.masks.strided(),
        "star": ua.masks.star(),
        "streaming": ua.masks.streaming(),
    }
    plan = ua.plan(
        masks[name], seqlen=tokens, heads=heads, head_dim=128, effort="fast",
        chunks=CHUNKS.get(name), cluster=Cluster.load("h200").resize(nodes=1, gpus_per_node=ranks),
    )  # fmt: skip
    run = Together(plan, gpu.DEVICE)
    whole = {
        tensor: gpu.draw(heads, tokens, 128, i)
        for i, tensor in enumerate((Tensor.Q, Tensor.K, Tensor.V, Tensor.DO))
    }
    found = []
    for rank, session in enumerate(run.sessions):
        session.transport = _Silence(session)  # type: ignore[arg-type, assignment]
        own = {t: plan.shard(x, rank, dim=2, keys=t.by_key) for t, x in whole.items()}
        own[Tensor.O] = torch.empty_like(own[Tensor.Q])
        own[Tensor.LSE] = own[Tensor.Q].new_empty(own[Tensor.Q].shape[:3], dtype=torch.float32)
        for grad, of in ((Tensor.DQ, Tensor.Q), (Tensor.DK, Tensor.K), (Tensor.DV, Tensor.V)):
            own[grad] = torch.empty_like(own[of])
        times = []
        for pass_ in Pass:

            def once(rank: int = rank, pass_: Pass = pass_, own: Any = own) -> None:
                Execution(
                    run.sessions[rank], run._steps[pass_][rank],  # type: ignore[arg-type]
                    (plan.q_layout, plan.kv_layout), own, 1, run._tiles[rank], 60.0, str(pass_),
                ).run()  # fmt: skip

            with torch.no_grad():
                times.append(gpu.timed(gpu.captured(once), 10, 4))
        found.append(times)
    return found


def rank_cells(path: Path, seconds: float) -> None:
    """All cells of `ranks`."""
    end, cells = time.monotonic() + seconds, []
    for name, tokens, heads in CELLS:
        if time.monotonic() > end:
            break
        cell: dict[str, Any] = {"mask": name, "tokens": tokens, "heads": heads}
        try:
            alone, two = (rank_ms(name, tokens, heads, ranks) for ranks in (1, 2))
            cell |= {"one_rank_ms": alone, "two_ranks_ms": two}
            middle = [[statistics.median(ms) for ms in rank] for rank in (*alone, *two)]
            for i, what in enumerate(("forward", "backward")):
                half = middle[0][i] / 2
                cell[what] = {
                    "half_of_one_ms": round(half, 4),
                    "slowest_ms": round(max(rank[i] for rank in middle[1:]), 4),
                    "ratio": round(max(rank[i] for rank in middle[1:]) / half, 3),
                }
        except Exception as error:
            cell["failed"] = f"{type(error).__name__}: {error}"[:300]
        cells.append(cell)
        print({k: x for k, x in cell.items() if not k.endswith("_ms")}, flush=True)
        path.write_text(json.dumps({"machine": gpu.machine(), "cells": cells}, indent=1) + "\n")
        torch.cuda.empty_cache()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("section", choices=("tune", "ranks"))
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--seconds", type=float, default=300.0, help="of ranks")
    parser.add_argument("--out", default="benchmarks/results")
    options = parser.parse_args()
    if options.section == "ranks":
        rank_cells(Path(options.out) / "gpu_sparse_ranks.json", options.seconds)
        return
    tune(Path(options.out) / "gpu_sparse_kernel.json", options.processes)


if __name__ == "__main__":
    main()
