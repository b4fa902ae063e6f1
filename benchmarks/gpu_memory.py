"""Memory beside what plans say, its growth over calls, and host time of a call, on one GPU.

    python benchmarks/gpu_memory.py --ranks 1
    python benchmarks/gpu_memory.py --ranks 2

All ranks share the first GPU, so times of calls mean nothing; memory does, and so do host times of
one rank. Bytes of each rank: what the plan says, what the workspace holds, the places for messages
of peers, and what PyTorch holds beyond the caller's tensors after calls forward and backward.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

import gpu
import ultraattn as ua
from ultraattn.cluster import Cluster
from ultraattn.plans.passes import Pass

CELLS = (
    ("causal", 8192, 32, True, 60),
    ("causal", 32768, 8, True, 30),
    ("window", 16384, 32, True, 60),
    ("causal", 8192, 32, False, 40),
)
"""(mask, tokens, key/value heads, graph, calls) of 32 heads of 128, in one process."""
MARKS = (5, 20)
"""Calls after which memory is looked at, beside the last."""


def cell_of(
    rank: int, ranks: int, mask: str, tokens: int, kv_heads: int, graph: bool, calls: int
) -> dict[str, Any]:
    """One rank's figures of one plan."""
    plan = ua.plan(
        gpu.MASKS[mask], seqlen=tokens, heads=32, kv_heads=kv_heads, head_dim=128, effort="fast",
        cluster=Cluster.load("h200").resize(nodes=1, gpus_per_node=ranks),
    )  # fmt: skip
    *ins, dout = [
        plan.shard(gpu.draw(heads, tokens, 128, i).transpose(1, 2), rank, dim=1)
        .contiguous()
        .transpose(1, 2)
        for i, heads in enumerate((32, kv_heads, kv_heads, 32))
    ]
    leaves = [x.requires_grad_() for x in ins]
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    base = torch.cuda.memory_allocated()
    attention = ua.Attention(plan, graph=graph, timeout_s=60)
    session = attention._session

    def forward() -> Any:
        with torch.no_grad():
            return attention(*leaves)

    def both() -> Any:
        return torch.autograd.grad(attention(*leaves), leaves, dout)

    torch.cuda.reset_peak_memory_stats()
    marks = []
    for call in range(calls):
        both()
        if call in (*MARKS, calls - 1):
            torch.cuda.synchronize()
            free, _ = torch.cuda.mem_get_info()
            marks.append([call, torch.cuda.memory_allocated() - base, free])
    found: dict[str, Any] = {
        "rank": rank, "mask": mask, "tokens": tokens, "heads": 32, "kv_heads": kv_heads,
        "graph": graph,
        "plan_says": {str(pass_): int(plan.account(pass_).memory[rank]) for pass_ in Pass},
        "workspace": session.workspace.bytes_held,
        "places": sum(places.bytes for places in getattr(session.transport, "_places", [])),
        "inputs": sum(x.numel() * x.element_size() for x in (*leaves, dout)),
        "peak": torch.cuda.max_memory_allocated() - base,
        "after_calls": marks,
    }  # fmt: skip
    for _ in range(8):
        forward()
    runs: dict[str, Callable[[], Any]] = {"forward": forward, "forward_backward": both}
    found["host_us"] = {name: gpu.host_us(run) for name, run in runs.items()}
    return found


def work(rank: int, ranks: int, port: int, out: str) -> None:
    """Every cell on one rank."""
    faulthandler.dump_traceback_later(240, exit=True)
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    torch.cuda.set_device(0)
    dist.init_process_group(
        "gloo" if ranks > 1 else "nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank,
        world_size=ranks,
    )  # fmt: skip
    cells: list[dict[str, Any]] = []
    for cell in CELLS:
        cells.append(cell_of(rank, ranks, *cell))
        torch.cuda.empty_cache()
        gathered: list[Any] = [None] * ranks
        dist.all_gather_object(gathered, cells)
        if rank == 0:
            whole = {"machine": gpu.machine(), "ranks": ranks, "cells_by_rank": gathered}
            Path(out).write_text(json.dumps(whole, indent=1) + "\n")
            for per_rank in gathered:
                print({k: x for k, x in per_rank[-1].items() if k != "host_us"}, flush=True)
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


def main() -> None:
    """Reads the options, starts the ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", default="benchmarks/results")
    given = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = str(Path(given.out) / f"gpu_memory_{given.ranks}.json")
    torch.multiprocessing.spawn(work, (given.ranks, port, path), nprocs=given.ranks)


if __name__ == "__main__":
    main()
