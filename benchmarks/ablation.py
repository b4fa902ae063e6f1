"""Takes the stages after the assignment apart: launches joined or not, order scheduled or not.

    python benchmarks/ablation.py
    python benchmarks/ablation.py --measured --ranks 2

The first simulates cells of masks, ranks, heads and tokens on h100 and h200 and writes
benchmarks/results/ablation.json. The second, on as many GPUs as ranks, runs four small cells in
every variant in at most 90 seconds and writes benchmarks/results/ablation_gpu_<ranks>.json.

The variants of a cell have one assignment, with all heads in a block; microseconds of a pass:

    assignment          a launch a block, as built
    greedy              launches and messages joined greedily, as in the paper, as built
    fusion              joined by the longer search that plans use, as built
    schedule            a launch a block, in the order of the least makespan found
    fusion_schedule     joined by the search, then in that order
    arrival             launches by arrival, as plans begin with
    arrival_schedule    the same in the order of the least makespan found
    coarse              those joined by when they can run, the fastest way
    coarse_schedule     the same in the order of the least makespan found
    plan                the fastest of fusion_schedule and the last four, as plans take it
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import platform
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ultraattn as ua
from ultraattn.cluster import Cluster
from ultraattn.planning.arrange import Arranged, Arranger
from ultraattn.planning.coarsen import coarser
from ultraattn.planning.dependency_graph import build_finest
from ultraattn.planning.fusion import How, fuse
from ultraattn.planning.fusion_costs import cost_of, quantum_of, task_seconds
from ultraattn.planning.graph import build_program
from ultraattn.planning.tiling import Effort
from ultraattn.plans import Compute, Pass, Plan

RESULTS = Path(__file__).parent / "results"
MASKS = {
    name: ua.masks.by_name(name)
    for name in ("full", "causal", "strided", "global_local", "star", "streaming")
}
HEADS, TOKENS, RANKS = (1, 4, 32), (8_192, 65_536), (4, 8)
CLUSTERS = ("h100", "h200")
LATE = ("arrival", "arrival_schedule", "coarse", "coarse_schedule", "fusion_schedule")
"""What a plan takes the fastest of (`ultraattn.planning.arrange`)."""


def planned(mask: str, ranks: int, heads: int, tokens: int, cluster: str, chunks: int = 8) -> Plan:
    """One assignment by the quick search (strided keeps its own 16 cells)."""
    return ua.plan(
        MASKS[mask], seqlen=tokens, heads=heads, head_dim=128, head_groups=1, strategy="tile",
        chunks=16 if mask == "strided" else chunks, effort="fast",
        cluster=Cluster.load(cluster).resize(1, ranks),
    )  # fmt: skip


def variants(plan: Plan, pass_: Pass, effort: Effort) -> dict[str, Arranged]:
    """Every variant of one pass, with its simulated time."""
    place, costs = plan.place.node_of, Cluster.load(plan.place.cluster).known_costs
    given = pass_, plan.problem, plan.q_layout, plan.kv_layout, place
    arranger = Arranger(*given, costs)
    started = plan.pass_plan(pass_).program
    blocks = started.block_views
    rank_of = {
        block: task.rank
        for task in started.task_views
        if isinstance(task, Compute)
        for block in task.tile
    }
    ranks = [rank_of[block] for block in range(len(blocks))]
    finest = build_finest(*given, blocks, ranks)
    by_arrival = build_program(*given, blocks, ranks)
    quantum = quantum_of(task_seconds(*given, finest, costs))
    cost = cost_of(*given, costs, quantum)
    greedy = fuse(finest, plan.problem, place, cost, how=How.GREEDY).program
    coarse = min(
        (arranger.timed(made, (name,)) for name, made in coarser(by_arrival, plan.problem, place)),
        key=lambda one: one.time_ns,
        default=arranger.timed(by_arrival, ()),
    )
    fused, note = arranger.fused(finest, (by_arrival, coarse.program), effort)
    found = {
        "assignment": arranger.timed(finest, ()),
        "greedy": arranger.timed(greedy, ()),
        "fusion": arranger.timed(fused, (note,)),
        "schedule": arranger.scheduled(finest, (), effort),
        "fusion_schedule": arranger.scheduled(fused, (note,), effort),
        "arrival": arranger.timed(by_arrival, ()),
        "arrival_schedule": arranger.scheduled(by_arrival, (), effort),
        "coarse": coarse,
        "coarse_schedule": arranger.scheduled(coarse.program, coarse.notes, effort),
    }
    found["plan"] = min((found[name] for name in LATE), key=lambda one: one.time_ns)
    return found


def simulated(names: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Every cell."""
    for name in names:
        for ranks, heads, tokens, mask in itertools.product(RANKS, HEADS, TOKENS, MASKS):
            plan = planned(mask, ranks, heads, tokens, name)
            for pass_ in Pass:
                start = time.process_time()
                found = variants(plan, pass_, Effort.NORMAL)
                yield {
                    "cluster": name, "mask": mask, "ranks": ranks, "heads": heads,
                    "tokens": tokens, "pass": str(pass_),
                    "blocks": len(plan.pass_plan(pass_).program.block_views),
                    "us": {way: one.time_ns / 1e3 for way, one in found.items()},
                    "cpu_s": round(time.process_time() - start, 2),
                }  # fmt: skip


def mean(ratios: list[float]) -> float:
    """The geometric mean."""
    return round(math.exp(sum(map(math.log, ratios)) / len(ratios)), 3)


def gains(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """How many times shorter each stage makes a pass: geometric means, and the most."""
    steps = {
        "fusion": ("assignment", "fusion"),
        "schedule": ("assignment", "schedule"),
        "schedule after fusion": ("fusion", "fusion_schedule"),
        "both": ("assignment", "fusion_schedule"),
        "search over greedy": ("greedy", "fusion"),
        "joined by when they can run": ("arrival", "coarse"),
        "plan over launches by arrival": ("arrival", "plan"),
    }
    out: dict[str, Any] = {"cells": len(cells)}
    for name, (before, after) in steps.items():
        ratios = [cell["us"][before] / cell["us"][after] for cell in cells]
        out[name] = [mean(ratios), round(max(ratios), 3)]
    return out


def summary(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Gains of all cells, and of those alike in one respect."""
    out = {"all": gains(cells)}
    for what in ("cluster", "pass", "heads", "tokens", "ranks", "mask"):
        for value in dict.fromkeys(cell[what] for cell in cells):
            out[f"{what} {value}"] = gains([cell for cell in cells if cell[what] == value])
    return out


# On GPUs

MEASURED = (("causal", 1, 16_384), ("causal", 4, 8_192), ("star", 4, 16_384), ("full", 32, 8_192))
"""Cells that are run: mask, heads, tokens."""


def work(rank: int, ranks: int, port: int, seconds: float, path: str) -> None:
    """All cells on one rank, until the time is over."""
    import torch
    import torch.distributed as dist

    import gpu

    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    end = time.monotonic() + seconds
    torch.cuda.set_device(rank)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("nccl", init_method=address, rank=rank, world_size=ranks)
    cells: list[dict[str, Any]] = []
    for mask, heads, tokens in MEASURED:
        plan = planned(mask, ranks, heads, tokens, "h200", chunks=2 * ranks)
        # Effort fast asks no solver: the machine need not have one.
        both = [variants(plan, pass_, Effort.FAST) for pass_ in Pass]
        for way in (way for way in both[0] if way != "plan"):
            late = torch.tensor(int(time.monotonic() > end), device="cuda")
            dist.broadcast(late, 0)
            if int(late):
                break
            passes = {
                str(pass_): dataclasses.replace(plan.pass_plan(pass_), program=found[way].program)
                for pass_, found in zip(Pass, both, strict=True)
            }
            cell = {"mask": mask, "heads": heads, "tokens": tokens, "way": way}
            cell["simulated_us"] = [found[way].time_ns / 1e3 for found in both]
            whole = dataclasses.replace(plan, **passes)
            gpu.attempt(cells, cell, lambda p=whole: gpu.plan_cell(p, rank, "symmetric", True, 10))
            if rank == 0:
                print(gpu.shown(cells[-1]), flush=True)
                made = {"machine": gpu.machine(), "ranks": ranks, "cells": cells}
                Path(path).write_text(json.dumps(made, indent=1) + "\n")
    dist.destroy_process_group()


def measure(ranks: int, seconds: float, folder: Path) -> None:
    """Runs the cells on `ranks` GPUs."""
    import torch.multiprocessing

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = str(folder / f"ablation_gpu_{ranks}.json")
    torch.multiprocessing.spawn(work, (ranks, port, seconds, path), nprocs=ranks)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--clusters", default=",".join(CLUSTERS))
    parser.add_argument(
        "--measured", action="store_true", help="run on GPUs in place of simulating"
    )
    parser.add_argument("--ranks", type=int, default=2, help="GPUs of --measured")
    parser.add_argument(
        "--seconds",
        type=float,
        default=70.0,
        help="of --measured: begin no variant later than this",
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.measured:
        measure(given.ranks, given.seconds, given.out)
        return
    cells = []
    for cell in simulated(tuple(given.clusters.split(","))):
        cells.append(cell)
        print(json.dumps(cell), flush=True)
    result = {
        "command": " ".join(["python", *sys.argv]),
        "machine": f"{platform.machine()}, {platform.system()}, one thread; times are simulated",
        "summary": summary(cells),
        "cells": cells,
    }
    (given.out / "ablation.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["summary"], indent=1))


if __name__ == "__main__":
    main()
