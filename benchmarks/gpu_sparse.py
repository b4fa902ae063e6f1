"""Times the sizes of the `sparse` kernel on one GPU, and its rates, into JSON files.

    python benchmarks/gpu_sparse.py tune --out benchmarks/results

Full squares of 8,192 tokens (and a causal one), by head_dim and kernel: every size in `TRIED` that
compiles and gives what the first does. Processes compile side by side, then one measures.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import gpu
from ultraattn.masks.grid import OPEN_HI, OPEN_LO, BlockKind
from ultraattn.runtime.kernels import sparse
from ultraattn.runtime.kernels.lists import Cell
from ultraattn.runtime.kernels.sparse import BlockSet, Extent, Place, Sizes

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


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("section", choices=("tune",))
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--out", default="benchmarks/results")
    options = parser.parse_args()
    tune(Path(options.out) / "gpu_sparse_kernel.json", options.processes)


if __name__ == "__main__":
    main()
