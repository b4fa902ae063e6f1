"""Turns the reference instances into a table of what the planner finds: volume, bound, seconds."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ultraattn.planning.ledger import Ints, TilingProblem

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
