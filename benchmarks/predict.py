"""Simulates `auto` over a grid of cells, beside the best rival and the bound; one JSON line a cell.

    python benchmarks/predict.py --minutes 30 --processes 2     # resumes where it stopped
    python benchmarks/predict.py --report                       # counts what is there
    python benchmarks/predict.py --plot benchmarks/results/predict.svg

A cell is (mask, ranks, tokens, heads, preset). Cells come in a fixed mixed order, so that the first
of them are a fair sample of all 1,728; the layouts of a cell, and the assignments over them, are
shared between its three presets. All times are simulated. `rival_s` is the time that no rival beats
over any layout, both passes together: that of the best rival where it was simulated, else a floor
above the choice. `bound_s` is the larger of the usual bound (`simulate.bound_s`) and of what no
plan over the chosen layout beats (`ultraattn.planning.least_time`).

Each line names the state of the planner that made it (`state`: a digest of its sources and of the
presets). Cells of other states are run again, and never counted together: a report or plot is of
one state, the present one unless `--state` names another, and says how many cells the others have.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import ultraattn
from ultraattn import masks
from ultraattn.cluster import Cluster
from ultraattn.masks import Mask
from ultraattn.planning.assign import TileOptions
from ultraattn.planning.choose import best_passes
from ultraattn.planning.collecting import no_collecting
from ultraattn.planning.least_time import least_seconds
from ultraattn.planning.passes import Where
from ultraattn.planning.plan import Known, most_promising, settings
from ultraattn.planning.setting import Setting, Shape
from ultraattn.planning.tiling import Effort
from ultraattn.plans.check import Pass
from ultraattn.simulation.simulate import bound_s

MASKS = (
    "full", "causal", "strided", "global_local", "star", "streaming", "document",
    "sliding_window",
)  # fmt: skip
DENSE = ("full", "causal")
RANKS = (2, 4, 8, 16, 32, 64)
TOKENS = (8 * 2**10, 64 * 2**10, 512 * 2**10)
HEADS = ((32, 32), (32, 8), (8, 1), (1, 1))
PRESETS = ("a800", "h100", "h200")
RESULTS = Path(__file__).parent / "results"
PLANNER = ("chunks.py", "cluster", "masks", "planning", "plans", "simulation", "strategies")
"""What of the package the times depend on."""
UNKNOWN = "unknown"
"""The state of cells from before states were written down."""
Problem = tuple[str, int, int, tuple[int, int]]


def state() -> str:
    """Names the present planner: equal for equal sources and presets."""
    package = Path(ultraattn.__file__).parent
    files = sorted(
        path
        for name in PLANNER
        for path in ([package / name] if name.endswith(".py") else (package / name).rglob("*"))
        if path.suffix in (".py", ".json")
    )
    digest = hashlib.sha256()
    for path in files:
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def problems() -> list[Problem]:
    """All cells but for the preset, in a fixed mixed order."""
    every = itertools.product(MASKS, RANKS, TOKENS, HEADS)
    return sorted(every, key=lambda cell: hashlib.sha256(repr(cell).encode()).digest())


def mask_of(name: str, tokens: int) -> Mask:
    """A mask of the grid; documents of uneven lengths, a window of a sixteenth."""
    if name == "document":
        cuts = [0, tokens // 3, tokens // 2, tokens // 2 + tokens // 10, tokens]
        return masks.document([b - a for a, b in itertools.pairwise(cuts)])
    if name == "sliding_window":
        return masks.sliding_window(tokens // 16)
    return masks.by_name(name)


def cluster_of(preset: str, ranks: int) -> Cluster:
    """Ranks of one node, or of full nodes."""
    cluster = Cluster.load(preset)
    node = cluster.gpus_per_node
    return cluster.resize(-(-ranks // node), min(ranks, node))


def cells(
    problem: Problem, effort: str, presets: Sequence[str] = PRESETS
) -> Iterator[dict[str, Any]]:
    """The cell of each preset."""
    name, ranks, tokens, (heads, kv_heads) = problem
    mask = mask_of(name, tokens)
    shape = Shape(tokens, tokens, heads, kv_heads, 128, 128, "bfloat16", 128**-0.5)
    options = TileOptions(effort=Effort(effort))
    made: dict[int, tuple[list[Setting], Setting]] = {}
    for preset in presets:
        begin = time.process_time()
        cluster = cluster_of(preset, ranks)
        if cluster.align not in made:
            known: Known = {}
            layouts, tiles = (
                settings(mask, shape, cluster, strategy, "auto", None, None, options, known)
                for strategy in ("auto", "tile")
            )
            made[cluster.align] = layouts, most_promising(tiles, options)
        where = Where.of(cluster)
        with no_collecting():
            layouts, tile = made[cluster.align]
            choice = best_passes(layouts, where, options, tile)
        parts = {Pass.FORWARD: choice.forward, Pass.BACKWARD: choice.backward}
        bounds = [
            max(
                bound_s(
                    str(p), choice.made.problem, ranks, cluster.known_costs, part.bounds.lower_bound
                ),
                least_seconds(p, choice.made, where, part.predicted_s or 0.0),
            )
            for p, part in parts.items()
        ]
        times = [part.predicted_s or 0.0 for part in parts.values()]
        yield {
            "mask": name, "ranks": ranks, "tokens": tokens, "heads": heads, "kv_heads": kv_heads,
            "preset": preset, "effort": effort, "state": state(),
            "chosen": [part.strategy for part in parts.values()],
            "layout": choice.made.q_layout.name, "chunks": len(choice.made.q_layout.chunks),
            "forward_s": times[0], "backward_s": times[1], "time_s": sum(times),
            "rival": choice.least_rival, "rival_s": choice.least_rival_ns / 1e9,
            "bound_s": sum(bounds),
            "planning_cpu_s": round(time.process_time() - begin, 3),
        }  # fmt: skip


def read(path: Path) -> list[dict[str, Any]]:
    """The cells that are there; a last line cut short is left out."""
    found = []
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                continue
    return found


def key(cell: dict[str, Any]) -> tuple[Any, ...]:
    """What names a cell."""
    return tuple(cell[n] for n in ("mask", "ranks", "tokens", "heads", "kv_heads", "preset"))


def of_state(found: Sequence[dict[str, Any]], which: str) -> list[dict[str, Any]]:
    """The cells that one state of the planner made."""
    return [cell for cell in found if cell.get("state", UNKNOWN) == which]


def run(
    out: Path,
    effort: str,
    todo: Sequence[tuple[Problem, list[str]]],
    minutes: float,
    processes: int,
) -> None:
    """Appends the cells of some problems to a file, in their order, until time is up."""
    end = time.monotonic() + 60 * minutes
    out.parent.mkdir(exist_ok=True)
    waiting, count = iter(todo), 0
    under_way: set[Future[list[dict[str, Any]]]] = set()
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        while True:
            while len(under_way) < processes and time.monotonic() < end:
                following = next(waiting, None)
                if following is None:
                    break
                under_way.add(pool.submit(cells_of, following[0], effort, following[1]))
            if not under_way:
                return
            done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
            with out.open("a") as file:
                for each in done:
                    made = each.result()
                    file.writelines(json.dumps(cell) + "\n" for cell in made)
                    count += len(made)
                    sys.stderr.write(f"{count} cells, last {key(made[-1])}\n")


def cells_of(problem: Problem, effort: str, presets: Sequence[str]) -> list[dict[str, Any]]:
    """`cells` as a list: what a process hands back."""
    return list(cells(problem, effort, presets))


def report(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Shares and medians over the cells that are there."""
    sparse = [c for c in found if c["mask"] not in DENSE]
    # By more than 0.01 %: sums of rounded times differ by less.
    faster = [c for c in sparse if c["time_s"] * 1.0001 < c["rival_s"]]
    clearly = [c for c in sparse if c["time_s"] * 1.01 < c["rival_s"]]
    over = [c["time_s"] / c["bound_s"] for c in found if c["bound_s"]]
    gain = [c["rival_s"] / c["time_s"] for c in sparse]
    seconds = [c["planning_cpu_s"] for c in found]
    # A mesh of one column is rows by direct transfers, which this system plans too.
    level = [c for c in sparse if c["time_s"] == c["rival_s"]]
    rows = [c for c in level if c["rival"] == f"mesh:{c['ranks']}x1"]
    losing = [key(c) for c in found if c["time_s"] > c["rival_s"] * (1 + 1e-9)]
    by_ranks = {
        n: _by_ranks(mine) for n in RANKS if (mine := [c for c in found if c["ranks"] == n])
    }
    return {
        "cells": len(found),
        "of": len(problems()) * len(PRESETS),
        "sparse_cells": len(sparse),
        "sparse_strictly_faster": round(len(faster) / len(sparse), 3) if sparse else None,
        "sparse_faster_by_1_percent": round(len(clearly) / len(sparse), 3) if sparse else None,
        "sparse_level": round(len(level) / len(sparse), 3) if sparse else None,
        "sparse_level_with_rows": round(len(rows) / len(sparse), 3) if sparse else None,
        "sparse_over_rival_median": round(statistics.median(gain), 3) if gain else None,
        "sparse_over_rival_least": round(min(gain), 4) if gain else None,
        "over_bound_median": round(statistics.median(over), 3) if over else None,
        "losing": losing,
        "planning_cpu_s_mean": round(statistics.mean(seconds), 2) if seconds else None,
        "over_bound_median_by": {
            name: {
                str(value): round(statistics.median(ratios), 3)
                for value in dict.fromkeys(c[name] for c in found)
                if (
                    ratios := [
                        c["time_s"] / c["bound_s"]
                        for c in found
                        if c[name] == value and c["bound_s"]
                    ]
                )
            }
            for name in ("mask", "tokens", "heads", "preset")
        },
        "by_ranks": by_ranks,
    }


def _by_ranks(mine: list[dict[str, Any]]) -> dict[str, Any]:
    planning = [c["planning_cpu_s"] for c in mine]
    over = statistics.median(c["time_s"] / c["bound_s"] for c in mine)
    return {
        "cells": len(mine),
        "over_bound_median": round(over, 3),
        "planning_cpu_s_median": round(statistics.median(planning), 2),
        "planning_cpu_s_most": max(planning),
    }


def plot(found: Sequence[dict[str, Any]], path: Path) -> None:
    """Each cell a point: rival over choice (up is faster), by ranks; an SVG of the data alone."""
    width, height, left, bottom = 720, 360, 60, 40
    shade = dict(
        zip(MASKS, ("#444", "#888", "#c33", "#e80", "#390", "#08a", "#03c", "#909"), strict=True)
    )
    ceiling = 3.0
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11">',
        f'<text x="{left}" y="14">simulated: best rival / auto (above 1: auto is faster)</text>',
    ]
    for mark in (1.0, 1.5, 2.0, 3.0):
        y = height - bottom - (mark - 0.9) / (ceiling - 0.9) * (height - bottom - 30)
        lines.append(f'<path d="M{left} {y:.1f}H{width - 110}" stroke="#ccc"/>')
        lines.append(f'<text x="{left - 30}" y="{y + 4:.1f}">{mark}</text>')
    for at, n in enumerate(RANKS):
        x = left + (at + 0.5) * (width - 110 - left) / len(RANKS)
        lines.append(f'<text x="{x:.0f}" y="{height - 15}" text-anchor="middle">{n} ranks</text>')
    for c in found:
        spot = int(hashlib.sha256(repr(key(c)).encode()).hexdigest()[:4], 16) / 65536
        x = left + (RANKS.index(c["ranks"]) + 0.15 + 0.7 * spot) * (width - 110 - left) / len(RANKS)
        ratio = min(ceiling, c["rival_s"] / c["time_s"])
        y = height - bottom - (ratio - 0.9) / (ceiling - 0.9) * (height - bottom - 30)
        lines.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="{shade[c["mask"]]}"/>')
    for at, name in enumerate(MASKS):
        lines.append(
            f'<text x="{width - 100}" y="{40 + 16 * at}" fill="{shade[name]}">{name}</text>'
        )
    path.write_text("\n".join([*lines, "</svg>"]) + "\n")


def main() -> None:
    """Reads options, runs or reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--out", type=Path, default=RESULTS / "predict.jsonl")
    parser.add_argument("--effort", default="normal", choices=[str(e) for e in Effort])
    parser.add_argument("--most-ranks", type=int, default=max(RANKS))
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--state", default=state(), help="of the report and the plot")
    args = parser.parse_args()
    if not args.report and args.plot is None:
        known = {key(cell) for cell in of_state(read(args.out), state())}
        todo = []
        for problem in problems():
            name, ranks, tokens, heads = problem
            missing = [p for p in PRESETS if (name, ranks, tokens, *heads, p) not in known]
            if missing and ranks <= args.most_ranks:
                todo.append((problem, missing))
        run(args.out, args.effort, todo, args.minutes, args.processes)
    every = read(args.out)
    found = of_state(every, args.state)
    if args.plot is not None:
        plot(found, args.plot)
    others = Counter(cell.get("state", UNKNOWN) for cell in every)
    others.pop(args.state, None)
    whole = {"state": args.state, **report(found), "cells_of_other_states": dict(others)}
    sys.stdout.write(json.dumps(whole, indent=2) + "\n")


if __name__ == "__main__":
    main()
