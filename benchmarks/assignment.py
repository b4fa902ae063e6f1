"""Turns the reference instances into a table of what the planner finds: volume, bound, seconds."""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import platform
import sys
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from ultraattn.planning.ledger import Ints, TilingProblem
from ultraattn.planning.tiling import Effort, solve

HERE = Path(__file__).parent
REFERENCE = HERE / "data" / "planning_reference.csv"

# The masks of the paper on their own grids, in half blocks: 2 full, 1 causal (design, Masks).


def cells(mask: str) -> Ints:
    """The mask on its own grid, in half blocks; strided in its remapped order."""
    size = {"strided": 16, "global_local": 16, "star": 4, "streaming": 8, "full": 1, "causal": 1}
    row, column = np.indices((size[mask], size[mask]))
    if mask == "full":
        return np.full((1, 1), 2, dtype=np.int64)
    if mask == "causal":
        return np.ones((1, 1), dtype=np.int64)
    if mask == "strided":
        seen = (row % 4 == column % 4) & (abs(row // 4 - column // 4) < 3)
        order = sorted(range(16), key=lambda cell: (cell % 4, cell // 4))
        return (2 * seen)[np.ix_(order, order)].astype(np.int64)
    if mask == "global_local":
        return (2 * ((row == 0) | (column == 0) | (row == column))).astype(np.int64)
    below = (column == 0) & (row > 0)
    if mask == "streaming":
        below |= (row > column) & (row - column < 3)
    return (2 * below + (row == column)).astype(np.int64)


def weights(mask: str, chunks: int) -> tuple[Ints, int]:
    """Block weights on `chunks` x `chunks`, exact, as integers; and what a full block weighs."""
    grid = cells(mask)
    fine = math.lcm(len(grid), chunks)
    per_cell, per_chunk = fine // len(grid), fine // chunks
    half_causal = 2 * np.tri(per_cell, k=-1, dtype=np.int64) + np.eye(per_cell, dtype=np.int64)
    full = np.full((per_cell, per_cell), 2, dtype=np.int64)
    parts = np.kron(grid == 2, full) + np.kron(grid == 1, half_causal)
    blocks = parts.reshape(chunks, per_chunk, chunks, per_chunk).sum(axis=(1, 3))
    return blocks, 2 * per_chunk * per_chunk


@dataclass(frozen=True)
class Row:
    """One instance of the reference."""

    mask: str
    ranks: int
    chunks: int
    load_cap: str
    cap: float
    best: int
    bound: int
    row_volume: int
    row_load: float


def reference() -> list[Row]:
    """The instances and the best values seen for them."""
    with REFERENCE.open() as file:
        return [
            Row(
                r["mask"],
                int(r["ranks"]),
                int(r["chunks"]),
                r["load_cap"],
                float(r["cap_value"]),
                int(r["best_volume_seen"]),
                int(r["lower_bound"]),
                int(r["row_owner_volume"]),
                float(r["row_owner_load_over_mean"]),
            )
            for r in csv.DictReader(file)
        ]


def problem_of(row: Row) -> TilingProblem:
    """The instance in the paper's forward units: Q 1, KV 2, partial O 1."""
    weight, full = weights(row.mask, row.chunks)
    owner = np.arange(row.chunks, dtype=np.int64) * row.ranks // row.chunks

    def size(value: int) -> Ints:
        return np.full((1, row.chunks), value, dtype=np.int64)

    return TilingProblem(
        ranks=row.ranks,
        weight=weight[None],
        q_owner=owner,
        kv_owner=owner,
        row_in=size(1),
        row_out=size(1),
        col_in=size(2),
        col_out=size(0),
        segments=((0,),),
        cap=int(row.cap * full),
    )


def measure(row: Row, effort: Effort) -> dict[str, object]:
    """What the planner finds for one instance, in the paper's units, beside the reference."""
    problem = problem_of(row)
    wall, process = time.perf_counter(), time.process_time()
    result = solve(problem, effort)
    return {
        "mask": row.mask,
        "ranks": row.ranks,
        "chunks": row.chunks,
        "load_cap": row.load_cap,
        "cap_value": row.cap,
        "max_volume": result.max_volume,
        "lower_bound": result.lower_bound,
        "gap": round(float(result.gap), 4),
        "proved": result.proved,
        "total": result.total,
        "load_over_mean": round(result.max_load * row.ranks / problem.total_weight, 4),
        "origin": result.origin,
        "cap_raised": result.cap_raised_to is not None,
        "seconds": round(time.perf_counter() - wall, 3),
        "cpu_seconds": round(time.process_time() - process, 3),
        "reference_volume": row.best,
        "reference_bound": row.bound,
        "reference_gap": round((row.best - row.bound) / row.best, 4) if row.best else 0.0,
        "row_owner_volume": row.row_volume,
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, object]:
    """Counts against the reference, and mean gaps over the rows that the reference leaves open."""
    still = [r for r in rows if r["reference_volume"] > r["reference_bound"]]
    count = max(1, len(still))
    return {
        "rows": len(rows),
        "worse": sum(r["max_volume"] > r["reference_volume"] for r in rows),
        "better": sum(r["max_volume"] < r["reference_volume"] for r in rows),
        "proved": sum(r["proved"] for r in rows),
        "open_in_reference": len(still),
        "mean_gap_of_those": round(sum(r["gap"] for r in still) / count, 4),
        "mean_reference_gap": round(sum(r["reference_gap"] for r in still) / count, 4),
        "longest_seconds": max((r["seconds"] for r in rows), default=0.0),
    }


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Volume over the reference, and both gaps, one dot a row (needs matplotlib)."""
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.5))
    for mask in sorted({r["mask"] for r in rows}):
        of_mask = [r for r in rows if r["mask"] == mask and r["reference_volume"]]
        size = [r["ranks"] * r["chunks"] for r in of_mask]
        ratio = [r["max_volume"] / r["reference_volume"] for r in of_mask]
        left.scatter(size, ratio, s=12, label=mask)
        right.scatter(
            [r["reference_gap"] for r in of_mask], [r["gap"] for r in of_mask], s=12, label=mask
        )
    left.axhline(1.0, color="grey", linewidth=0.8)
    left.set(xscale="log", xlabel="ranks x chunks", ylabel="volume over the reference")
    right.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
    right.set(xlabel="gap of the reference", ylabel="gap found")
    left.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def save(path: Path, effort: Effort, rows: list[dict[str, Any]], command: str) -> None:
    """Writes rows and where they come from; complete after every row, so a run can resume."""
    machine = {
        "cores": os.cpu_count(),
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
    for name in ("numba", "ortools"):
        try:
            machine[name] = version(name)
        except PackageNotFoundError:
            machine[name] = None
    document = {
        "command": command,
        "machine": machine,
        "effort": str(effort),
        "summary": summary(rows),
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Runs the instances that are asked for and not done yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--effort", type=Effort, choices=list(Effort), default=Effort.NORMAL)
    parser.add_argument("--mask", action="append", help="only these masks")
    parser.add_argument("--ranks", action="append", type=int, help="only these numbers of ranks")
    parser.add_argument("--chunks", action="append", type=int, help="only these numbers of chunks")
    parser.add_argument("--out", type=Path, help="JSON to write (default: results by effort)")
    parser.add_argument("--resume", action="store_true", help="keep the rows already in the JSON")
    parser.add_argument("--plot", type=Path, help="PNG to draw from the rows")
    given = parser.parse_args()
    path = given.out or HERE / "results" / f"assignment_{given.effort}.json"
    wanted = [
        row
        for row in reference()
        if (not given.mask or row.mask in given.mask)
        and (not given.ranks or row.ranks in given.ranks)
        and (not given.chunks or row.chunks in given.chunks)
    ]
    rows: list[dict[str, Any]] = []
    if given.resume and path.exists():
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    done = {(r["mask"], r["ranks"], r["chunks"], r["load_cap"]) for r in rows}
    command = "python benchmarks/assignment.py " + " ".join(sys.argv[1:])
    solve(problem_of(reference()[0]), given.effort)  # compile before the clock runs
    for row in wanted:
        if (row.mask, row.ranks, row.chunks, row.load_cap) in done:
            continue
        rows.append(measure(row, given.effort))
        save(path, given.effort, rows, command)
        found = rows[-1]
        print(
            f"{row.mask} {row.ranks} {row.chunks} {row.load_cap}: {found['max_volume']} "
            f"(reference {row.best}), bound {found['lower_bound']} (reference {row.bound}), "
            f"{found['seconds']} s"
        )
    save(path, given.effort, rows, command)
    print(json.dumps(summary(rows)))
    if given.plot:
        plot(rows, given.plot)


if __name__ == "__main__":
    main()
