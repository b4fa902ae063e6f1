"""Turns masks and clusters into tables of schedules and fusions: proofs, gaps, seconds, baselines.

    python benchmarks/schedule.py --cluster h100 [--parts small,large,paper,fusion]

Writes benchmarks/results/schedule_<cluster>.json. Seconds are of one core's time; a first schedule,
not counted, compiles or loads the inner loops.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import ultraattn as ua
from ultraattn.planning.dependency_graph import build_finest
from ultraattn.planning.fusion import Fuser, How, groups_like
from ultraattn.planning.fusion_costs import cost_of, durations_of, quantum_of, task_seconds
from ultraattn.planning.list_schedule import predict
from ultraattn.planning.schedule import baseline, check_schedule, schedule
from ultraattn.planning.schedule_program import jobs_of
from ultraattn.planning.tiling import Effort
from ultraattn.plans import Pass, Plan
from ultraattn.plans.program import Compute, Program

RESULTS = Path(__file__).parent / "results"
MASKS = {
    name: ua.masks.by_name(name)
    for name in ("full", "causal", "strided", "global_local", "star", "streaming")
}
TOKENS = 65_536
PAPER = (
    ("causal", 4, 8, 1073.0),
    ("causal", 8, 8, 176.0),
    ("streaming", 2, 8, 736.0),
    ("streaming", 4, 8, 114.0),
    ("strided", 8, 16, 1.81),
)
"""Table 5: mask, nodes or ranks, chunks, milliseconds of its solver. Strided: its own 16 cells."""


def planned(mask: str, cluster: ua.Cluster, chunks: int, **options: Any) -> Plan:
    """The plan, on the fewest chunks from `chunks` that the mask's layout takes."""
    if mask == "strided":
        chunks = -(-chunks // 16) * 16
    shape = {"seqlen": TOKENS, "heads": 32, "head_dim": 128, "effort": "fast", "head_groups": 1}
    return ua.plan(MASKS[mask], cluster=cluster, chunks=chunks, **(shape | options))


def arguments(plan: Plan, pass_: Pass) -> tuple[Any, ...]:
    """What costs and checks ask for."""
    return pass_, plan.problem, plan.q_layout, plan.kv_layout, plan.place.node_of


def scheduled(plan: Plan, pass_: Pass, cluster: ua.Cluster, effort: Effort) -> dict[str, Any]:
    """One pass at an effort, beside the breadth-first baseline."""
    program = plan.pass_plan(pass_).program
    seconds = task_seconds(*arguments(plan, pass_), program, cluster.known_costs)
    jobs = jobs_of(program, durations_of(seconds))
    start = time.process_time()
    found = schedule(jobs, effort)
    spent = time.process_time() - start
    check_schedule(jobs, found)
    plain = baseline(jobs)
    return {
        "pass": str(pass_),
        "tasks": len(jobs),
        "makespan_us": found.makespan * quantum_of(seconds) * 1e6,
        "bound_over_makespan": found.lower_bound / found.makespan,
        "gap": found.gap,
        "proved": found.proved,
        "origin": found.origin,
        "cpu_s": spent,
        "breadth_first_over_ours": plain.makespan / found.makespan,
    }


def small(name: str) -> Iterator[dict[str, Any]]:
    """Six masks, 2, 4, 8 ranks, 1 and 2 chunks a rank, both passes, at `best`."""
    for mask in MASKS:
        for ranks in (2, 4, 8):
            for each in (1, 2):
                cluster = ua.Cluster.load(name).resize(1, ranks)
                plan = planned(mask, cluster, ranks * each)
                for pass_ in Pass:
                    yield {
                        "mask": mask,
                        "ranks": ranks,
                        "chunks": len(plan.q_layout.chunks),
                        **scheduled(plan, pass_, cluster, Effort.BEST),
                    }


def large(name: str) -> Iterator[dict[str, Any]]:
    """64 ranks, 8 nodes of 8, a chunk a rank."""
    for mask in MASKS:
        cluster = ua.Cluster.load(name).resize(8, 8)
        plan = planned(mask, cluster, 64, effort="instant")
        for pass_ in Pass:
            yield {"mask": mask, "ranks": 64, **scheduled(plan, pass_, cluster, Effort.BEST)}


def paper(name: str) -> Iterator[dict[str, Any]]:
    """The cases of the paper's Table 5 that are known, their milliseconds beside ours."""
    for mask, nodes, chunks, milliseconds in PAPER:
        cluster = ua.Cluster.load(name).resize(nodes, 1)
        plan = planned(mask, cluster, chunks, seqlen=131_072)
        for pass_ in Pass:
            found = scheduled(plan, pass_, cluster, Effort.BEST)
            yield {"mask": mask, "nodes": nodes, "paper_ms": milliseconds, **found}


def finest(plan: Plan, pass_: Pass) -> Program:
    """The pass with one launch a block."""
    program = plan.pass_plan(pass_).program
    rank_of = {
        block: task.rank
        for task in program.task_views
        if isinstance(task, Compute)
        for block in task.tile
    }
    blocks = program.block_views
    ranks = [rank_of[block] for block in range(len(blocks))]
    return build_finest(*arguments(plan, pass_), blocks, ranks)


def fusion(name: str) -> Iterator[dict[str, Any]]:
    """Every block a launch, joined by arrival, greedily, further; and every choice of 12."""
    for mask in ("causal", "strided", "global_local", "star"):
        for ranks, heads, tokens in ((4, 1, 16_384), (4, 32, 65_536), (8, 4, 65_536)):
            cluster = ua.Cluster.load(name).resize(1, ranks)
            plan = planned(mask, cluster, 2 * ranks, heads=heads, seqlen=tokens)
            for pass_ in Pass:
                made = fused(plan, pass_, cluster)
                yield {"mask": mask, "ranks": ranks, "heads": heads, "tokens": tokens, **made}


def fused(plan: Plan, pass_: Pass, cluster: ua.Cluster) -> dict[str, Any]:
    """Predicted microseconds of one pass under every way to join launches."""
    program, costs = finest(plan, pass_), cluster.known_costs
    given = plan.pass_plan(pass_).program
    quantum = quantum_of(task_seconds(*arguments(plan, pass_), program, costs))
    cost = cost_of(*arguments(plan, pass_), costs, quantum)

    def fuser(most: int) -> Fuser:
        seeds = [groups_like(program, given)] if most > 12 else []
        return Fuser(program, plan.problem, plan.place.node_of, cost, most=most, seeds=seeds)

    every, few = fuser(1_000), fuser(12)
    start = time.process_time()
    greedy = every.choose(How.GREEDY)
    greedy_s = time.process_time() - start
    further = every.choose(How.SEARCH, rounds=1)
    search_s = time.process_time() - start
    of_few = {str(how): few.choose(how).after * quantum * 1e6 for how in How}
    default = task_seconds(*arguments(plan, pass_), given, costs)
    counted = np.maximum(1, np.rint(default / quantum)).astype(np.int64)
    return {
        "pass": str(pass_),
        "candidates": len(every.candidates),
        "blocks_alone_us": greedy.before * quantum * 1e6,
        "by_arrival_us": predict(jobs_of(given, counted)) * quantum * 1e6,
        "greedy_us": greedy.after * quantum * 1e6,
        "search_us": further.after * quantum * 1e6,
        "greedy_cpu_s": greedy_s,
        "search_cpu_s": search_s,
        "of_12_candidates_us": of_few,
    }


def summary(parts: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Counts and extremes of each part."""
    out: dict[str, Any] = {}
    for part in ("small", "large", "paper"):
        rows = parts.get(part, [])
        if rows:
            ratios = [r["breadth_first_over_ours"] for r in rows]
            out[part] = {
                "graphs": len(rows),
                "proved": sum(r["proved"] for r in rows),
                "proved_within_1_cpu_s": sum(r["proved"] and r["cpu_s"] < 1 for r in rows),
                "largest_gap": max(r["gap"] for r in rows),
                "most_cpu_s": max(r["cpu_s"] for r in rows),
                "breadth_first_over_ours": [min(ratios), float(np.mean(ratios)), max(ratios)],
            }
    rows = parts.get("fusion", [])
    if rows:
        few = [r["of_12_candidates_us"] for r in rows]
        over = [f["greedy"] / f["exhaustive"] for f in few]
        out["fusion"] = {
            "graphs": len(rows),
            "greedy_equals_exhaustive": sum(f["greedy"] == f["exhaustive"] for f in few),
            "search_equals_exhaustive": sum(f["search"] == f["exhaustive"] for f in few),
            "greedy_over_exhaustive": [float(np.mean(over)), max(over)],
            "search_over_greedy": [
                float(np.mean([r["search_us"] / r["greedy_us"] for r in rows])),
                min(r["search_us"] / r["greedy_us"] for r in rows),
            ],
            "search_over_by_arrival": [
                float(np.mean([r["search_us"] / r["by_arrival_us"] for r in rows])),
                min(r["search_us"] / r["by_arrival_us"] for r in rows),
            ],
        }
    return out


PARTS = {"small": small, "large": large, "paper": paper, "fusion": fusion}


def main() -> None:
    """Runs the parts asked for; keeps the others of an earlier run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cluster", default="h100", help="a preset, or a file")
    parser.add_argument("--parts", default=",".join(PARTS), help="of " + ", ".join(PARTS))
    given = parser.parse_args()
    parts: dict[str, list[dict[str, Any]]] = {}
    next(iter(paper(given.cluster)))
    for part in given.parts.split(","):
        parts[part] = []
        for row in PARTS[part](given.cluster):
            parts[part].append(row)
            print(part, json.dumps(row))
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"schedule_{Path(given.cluster).stem}.json"
    old = json.loads(path.read_text()) if path.exists() else {"parts": {}}
    parts = old["parts"] | parts
    command = " ".join(["python", *sys.argv])
    result = {
        "command": command,
        "machine": f"{platform.machine()}, {platform.system()}, one thread",
        "summary": summary(parts),
        "parts": parts,
    }
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["summary"], indent=1))


if __name__ == "__main__":
    main()
