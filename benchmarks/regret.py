"""Runs every strategy of small cells on local processes, beside what the simulator predicts.

    ultraattn profile --ranks 2 --out here.json
    python benchmarks/regret.py --cluster here.json --ranks 2 --minutes 5

Writes one JSON line a cell: measured and predicted seconds of forward and backward by strategy.
The report says how log times correlate (R squared), Kendall's tau among the strategies of a cell,
and what the choice of `auto` takes over the best measured strategy. Use an idle machine.
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


def report(found: list[dict[str, Any]]) -> dict[str, Any]:
    """R squared of log times, the median tau, and the regret of `auto`."""
    x, y, taus, regrets = [], [], [], []
    for one in found:
        names = list(one["measured_s"])
        predicted = [one["predicted_s"][n] for n in names]
        measured = [one["measured_s"][n] for n in names]
        x += [math.log(t) for t in predicted]
        y += [math.log(t) for t in measured]
        taus.append(kendall(predicted, measured))
        regrets.append(one["measured_s"]["auto"] / min(measured))
    if not found:
        return {"cells": 0}
    return {
        "cells": len(found),
        "r_squared": round(statistics.correlation(x, y) ** 2, 3),
        "kendall_tau_median": round(statistics.median(taus), 3),
        "auto_over_best_median": round(statistics.median(regrets), 3),
        "auto_over_best_most": round(max(regrets), 3),
        "measured_over_predicted_median": round(
            math.exp(statistics.median(b - a for a, b in zip(x, y, strict=True))), 3
        ),
    }


def main() -> None:
    """Reads options, runs what is not done yet, reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cluster", default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "regret.jsonl")
    args = parser.parse_args()
    cluster = Cluster.load(args.cluster).resize(1, args.ranks)
    found = []
    if args.out.exists():
        found = [json.loads(line) for line in args.out.read_text().splitlines()]
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
