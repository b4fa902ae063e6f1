"""Runs every strategy of small cells on local processes, beside what the simulator predicts.

    ultraattn profile --ranks 2 --out here2.json
    python benchmarks/regret.py --cluster here2.json --ranks 2 --minutes 15
    ultraattn profile --ranks 4 --out here4.json
    python benchmarks/regret.py --cluster here4.json --ranks 4 --minutes 25

Fifteen cells a number of ranks. Writes one JSON line a cell: measured and predicted seconds of
forward and backward by strategy; cells that are there are not run again. The report says how log
times correlate (R squared), Kendall's tau among the strategies of each cell, and what the choice of
`auto` takes over the best measured strategy. Use an idle machine, and a profile of as many ranks:
it holds how ranks share cores.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ultraattn as ua
from ultraattn import masks
from ultraattn.cluster import Cluster
from ultraattn.errors import InputError
from ultraattn.masks import Mask
from ultraattn.plans import Pass
from ultraattn.plans.storage import dumps, loads
from ultraattn.runtime import Attention, share
from ultraattn.runtime.local import LocalRanks
from ultraattn.runtime.pieces import DTYPES
from ultraattn.strategies import NAMES

RESULTS = Path(__file__).parent / "results"
CELLS = tuple(
    itertools.product(("causal", "window", "document", "star", "full"), (1024, 2048, 4096))
)


def mask_of(name: str, tokens: int) -> Mask:
    """A mask of a cell."""
    if name == "window":
        return masks.sliding_window(tokens // 8)
    if name == "document":
        return masks.document([tokens // 2, tokens // 8, tokens - tokens // 2 - tokens // 8])
    return masks.by_name(name)


def timed(rank: int, plan_text: str, repeats: int) -> list[float]:
    """Seconds of forward and backward together, each repetition from a barrier."""
    plan = share(loads(plan_text) if rank == 0 else None)
    attention, p = Attention(plan), plan.problem
    random = torch.Generator().manual_seed(rank)
    tokens = plan.q_layout.local_tokens(rank), plan.kv_layout.local_tokens(rank)

    def tensor(heads: int, length: int, width: int) -> torch.Tensor:
        made = torch.randn(1, heads, length, width, generator=random).to(DTYPES[p.dtype])
        return made.requires_grad_()

    q = tensor(p.heads, tokens[0], p.head_dim)
    k = tensor(p.kv_heads, tokens[1], p.head_dim)
    v = tensor(p.kv_heads, tokens[1], p.value_dim)
    found = []
    for _ in range(repeats + 1):
        dist.barrier()
        begin = time.perf_counter()
        out = attention(q, k, v)
        out.sum().backward()
        dist.barrier()
        found.append(time.perf_counter() - begin)
    return found[1:]


def cell(
    local: LocalRanks, cluster: Cluster, name: str, tokens: int, repeats: int
) -> dict[str, Any]:
    """All strategies of a cell, measured in turns so that drift meets all alike."""
    plans = {}
    for strategy in ("auto", "tile", *NAMES):
        try:
            plans[strategy] = ua.plan(
                mask_of(name, tokens), seqlen=tokens, heads=4, kv_heads=2, head_dim=64,
                dtype="float32", cluster=cluster, strategy=strategy, effort="fast",
            )  # fmt: skip
        except InputError:
            continue
    measured: dict[str, list[float]] = {strategy: [] for strategy in plans}
    for _ in range(repeats):
        for strategy, plan in plans.items():
            by_rank = local.run(timed, dumps(plan), 2)
            measured[strategy].append(min(max(times) for times in zip(*by_rank, strict=True)))
    return {
        "mask": name, "tokens": tokens, "ranks": cluster.ranks,
        "chosen": [plans["auto"].pass_plan(pass_).strategy for pass_ in Pass],
        "measured_s": {s: statistics.median(times) for s, times in measured.items()},
        "predicted_s": {s: ua.simulate(plan, cluster).makespan_s for s, plan in plans.items()},
    }  # fmt: skip


def kendall(a: list[float], b: list[float]) -> float:
    """Kendall's tau of two orders; pairs that differ by less than 1 % in `a` count for nothing."""
    score = pairs = 0
    for i, j in itertools.combinations(range(len(a)), 2):
        if abs(a[i] - a[j]) < 0.01 * max(a[i], a[j]):
            continue
        pairs += 1
        score += 1 if (a[i] - a[j]) * (b[i] - b[j]) > 0 else -1
    return score / pairs if pairs else 1.0


def r_squared(found: list[dict[str, Any]]) -> float:
    """Of predicted and measured log times, all strategies of these cells."""
    x, y = (
        [math.log(t) for one in found for t in one[which].values()]
        for which in ("predicted_s", "measured_s")
    )
    return round(statistics.correlation(x, y) ** 2, 3)


def of_cell(one: dict[str, Any]) -> dict[str, Any]:
    """How well the strategies of a cell are told apart, and what was chosen."""
    measured: dict[str, float] = one["measured_s"]
    predicted: dict[str, float] = one["predicted_s"]
    best = min(measured, key=measured.__getitem__)
    return {
        "cell": f"{one['mask']}, {one['tokens']} tokens, {one['ranks']} ranks",
        "tau": round(kendall(list(predicted.values()), list(measured.values())), 3),
        "r_squared": r_squared([one]),
        "measured_over_predicted": round(
            statistics.median(measured[s] / predicted[s] for s in measured), 3
        ),
        "chosen": one.get("chosen"),
        "best_measured": best,
        "auto_over_best": round(measured["auto"] / measured[best], 3),
    }


def report(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Every cell; R squared of log times, the median tau, and the regret of `auto`."""
    if not found:
        return {"cells": 0}
    each = [of_cell(one) for one in found]
    regrets = [one["auto_over_best"] for one in each]
    ranks = sorted({one["ranks"] for one in found})
    return {
        "each": each,
        "cells": len(found),
        "r_squared": r_squared(found),
        "r_squared_by_ranks": {n: r_squared([c for c in found if c["ranks"] == n]) for n in ranks},
        "kendall_tau_median": round(statistics.median(one["tau"] for one in each), 3),
        "auto_over_best_median": round(statistics.median(regrets), 3),
        "auto_over_best_most": max(regrets),
        "auto_within_5_percent": sum(regret <= 1.05 for regret in regrets),
        "measured_over_predicted_median": round(
            statistics.median(one["measured_over_predicted"] for one in each), 3
        ),
    }


def read(path: Path) -> list[dict[str, Any]]:
    """The cells that are there; a last line cut short is left out."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def main() -> None:
    """Reads options, runs what is not done yet, reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cluster", default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "regret.jsonl")
    args = parser.parse_args()
    loaded = Cluster.load(args.cluster)
    if loaded.known_costs.measured and loaded.ranks < args.ranks:
        parser.error(
            f"{args.cluster} was measured with {loaded.ranks} ranks, which says nothing of how "
            f"{args.ranks} share cores: ultraattn profile --ranks {args.ranks}"
        )
    cluster = loaded.resize(1, args.ranks)
    found = read(args.out)
    done = {(one["mask"], one["tokens"], one["ranks"]) for one in found}
    end = time.monotonic() + 60 * args.minutes
    with LocalRanks(args.ranks) as local:
        for name, tokens in CELLS:
            if (name, tokens, args.ranks) in done or time.monotonic() > end:
                continue
            found.append(cell(local, cluster, name, tokens, args.repeats))
            with args.out.open("a") as file:
                file.write(json.dumps(found[-1]) + "\n")
            sys.stderr.write(f"{name}, {tokens} tokens\n")
    sys.stdout.write(json.dumps(report(found), indent=2) + "\n")


if __name__ == "__main__":
    main()
