"""Turns one pass of a plan into the attention matrix as it is drawn: the rank of every block."""

from __future__ import annotations

import colorsys
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ultraattn.chunks import Ints
from ultraattn.masks.grid import KIND_ORDER, BlockKind
from ultraattn.plans import Plan
from ultraattn.plans.check import Pass

GLYPHS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, eq=False)
class Matrix:
    """Who computes what, for one range of heads. Arrays have shape (query cells, key cells).

    A cell is one block, or a square of blocks where the matrix was made coarser; chunks stand in
    the order of the layout.
    """

    head_start: int
    head_stop: int
    rank: Ints
    """The rank that computes most of the cell; -1 where nothing is visible."""
    kind: Ints
    """`BlockKind.code`."""
    lo: Ints
    hi: Ints
    weight: Ints
    """Visible (query, key) pairs times heads."""
    rows: Ints
    """Queries of each row of cells, (query cells,)."""
    cols: Ints
    """Keys of each column of cells, (key cells,)."""
    blocks_a_side: int
    """Blocks along a side of a cell."""


def matrices(plan: Plan, pass_: Pass, most: int = 64) -> tuple[Matrix, ...]:
    """One matrix for every range of heads, of at most `most` cells a side."""
    program = plan.pass_plan(pass_).program
    blocks, owner = program.blocks, program.rank_of_block
    sizes = plan.q_layout.chunks.sizes(), plan.kv_layout.chunks.sizes()
    shape = len(sizes[0]), len(sizes[1])
    made = []
    for start, stop in _head_ranges(blocks.head_start, blocks.head_stop, plan.problem.heads):
        here = (blocks.head_start <= start) & (stop <= blocks.head_stop)
        at = blocks.q_chunk[here], blocks.kv_chunk[here]
        columns = {
            "rank": np.full(shape, -1, dtype=np.int64),
            **{name: np.zeros(shape, dtype=np.int64) for name in ("kind", "lo", "hi", "weight")},
        }
        columns["rank"][at] = owner[here]
        for name in ("kind", "lo", "hi"):
            columns[name][at] = getattr(blocks, name)[here]
        # A block of more heads than the range gives it its share.
        heads = (blocks.head_stop - blocks.head_start)[here]
        columns["weight"][at] = blocks.weight[here] * (stop - start) // heads
        fine = Matrix(start, stop, **columns, rows=sizes[0], cols=sizes[1], blocks_a_side=1)
        made.append(_coarser(fine, plan.ranks, most))
    return tuple(made)


def _head_ranges(starts: Ints, stops: Ints, heads: int) -> list[tuple[int, int]]:
    cuts = np.unique(np.concatenate([[0, heads], starts, stops])).tolist()
    return list(pairwise(cuts))


def _coarser(fine: Matrix, ranks: int, most: int) -> Matrix:
    """Squares of blocks as cells, so that no side has more than `most`."""
    side = max(1, *(-(-size // most) for size in fine.rank.shape))
    if side == 1:
        return fine
    rows, cols = (-(-size // side) for size in fine.rank.shape)
    q, kv = np.nonzero(fine.rank >= 0)
    cell = (q // side) * cols + kv // side
    weights = fine.weight[q, kv]
    per_rank = np.bincount(
        cell * ranks + fine.rank[q, kv], weights=weights, minlength=rows * cols * ranks
    ).reshape(rows, cols, ranks)
    weight = per_rank.sum(axis=2).astype(np.int64)
    height, width = (
        np.add.reduceat(sizes, np.arange(0, len(sizes), side)) for sizes in (fine.rows, fine.cols)
    )
    heads = fine.head_stop - fine.head_start
    full = weight == height[:, None] * width[None, :] * heads
    kind = np.where(full, BlockKind.FULL.code, BlockKind.PARTIAL.code)
    kind[weight == 0] = BlockKind.EMPTY.code
    return Matrix(
        fine.head_start,
        fine.head_stop,
        np.where(weight > 0, per_rank.argmax(axis=2), -1),
        kind,
        np.zeros_like(weight),
        np.zeros_like(weight),
        weight,
        height,
        width,
        side,
    )


def kind_of(matrix: Matrix, row: int, col: int) -> BlockKind:
    """The kind of a cell."""
    return KIND_ORDER[int(matrix.kind[row, col])]


def glyph(rank: int) -> str:
    """One character for a rank; they begin again after the 62nd."""
    return GLYPHS[rank % len(GLYPHS)]


def colour(rank: int) -> str:
    """One colour for a rank, as ``#rrggbb``; neighbours differ by the golden angle."""
    hue = (0.58 + rank * 0.381966) % 1.0
    lightness = (0.55, 0.68, 0.45)[rank // 8 % 3]
    red, green, blue = (round(255 * c) for c in colorsys.hls_to_rgb(hue, lightness, 0.62))
    return f"#{red:02x}{green:02x}{blue:02x}"
