"""Turns the tasks of a program into what each takes alone: kernels, copies, messages.

A note on launches. A kernel that takes rectangles runs a tile as the fewest rectangles found by
joining FULL blocks: heads that touch, then keys that touch, then rows with equal keys. A band
right after a full run of its row is the causal end of the same launch. A kernel that takes block
sets runs the tile as one launch as large as all of its blocks. The faster kernel is chosen.

    tile        x x x .        rectangles: 2 x 2 (rows 0 and 1), and two of one row;
                x x . .        the causal end \\ joins the run before it
                x x x \\
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ultraattn.chunks import Ints
from ultraattn.cluster.costs import HOW_TO_MEASURE, Costs, Kernel
from ultraattn.cluster.tables import Floats
from ultraattn.errors import InputError
from ultraattn.masks.grid import KIND_ORDER, BlockKind
from ultraattn.plans.layout import Layout
from ultraattn.plans.problem import Problem
from ultraattn.plans.program import TASK_ORDER, Block, Program, TaskKind

FULL, PARTIAL = KIND_ORDER.index(BlockKind.FULL), KIND_ORDER.index(BlockKind.PARTIAL)


def kernel_seconds(
    pass_: str,
    problem: Problem,
    q_layout: Layout,
    kv_layout: Layout,
    program: Program,
    costs: Costs,
    kernel: str | None = None,
) -> Floats:
    """Seconds of every compute task, alone on its device; 0 for other tasks: (tasks,).

    Args:
        pass_: forward or backward.
        problem: shapes and dtype.
        q_layout: sizes of the query chunks.
        kv_layout: sizes of the key chunks.
        program: the pass.
        costs: of the cluster.
        kernel: a kernel's name, or None for the fastest for each tile.

    Raises:
        InputError: no kernel has costs for a block of the program; names kernel and kind.
    """
    pieces = _Pieces.of(q_layout, kv_layout, program)
    return _fastest(pass_, problem, pieces, len(program.tasks.rank), costs, kernel)


@dataclass(frozen=True, eq=False)
class Tiles:
    """Blocks as columns of equal length, and the launch that each is part of."""

    launch: Ints
    q_chunk: Ints
    kv_chunk: Ints
    head_start: Ints
    head_stop: Ints
    kind: Ints
    weight: Ints
    """Visible pairs times heads."""

    @staticmethod
    def of(blocks: Sequence[Block], launches: Sequence[int] | Ints) -> Tiles:
        """Block b in launch ``launches[b]``."""
        rows = [
            (b.q_chunk, b.kv_chunk, b.head_start, b.head_stop, b.kind.code, b.weight)
            for b in blocks
        ]
        columns = np.array(rows, dtype=np.int64).reshape(-1, 6).T
        return Tiles(np.asarray(launches, dtype=np.int64), *columns)


def launch_seconds(
    pass_: str,
    problem: Problem,
    q_layout: Layout,
    kv_layout: Layout,
    tiles: Tiles,
    launches: int,
    costs: Costs,
) -> Floats:
    """As `kernel_seconds`, of launches that no program holds yet: (launches,)."""
    q_at, kv_at = _place(q_layout)[tiles.q_chunk], _place(kv_layout)[tiles.kv_chunk]
    pieces = _Pieces(
        tiles.launch, tiles.kind, tiles.head_start, tiles.head_stop,
        q_at, q_at + 1, kv_at, kv_at + 1,
        q_layout.chunks.sizes()[tiles.q_chunk], kv_layout.chunks.sizes()[tiles.kv_chunk],
        tiles.weight,
    )  # fmt: skip
    return _fastest(pass_, problem, pieces, launches, costs, None)


def _fastest(
    pass_: str, problem: Problem, pieces: _Pieces, tasks: int, costs: Costs, kernel: str | None
) -> Floats:
    if not len(pieces.task):
        return np.zeros(tasks)
    kernels = costs.kernels if kernel is None else (costs.kernel(kernel),)
    factor = costs.width_factor(problem.head_dim, problem.value_dim, problem.dtype)
    rectangles: tuple[_Pieces, Floats] | None = None
    least = np.full(tasks, np.inf)
    for candidate in kernels:
        if candidate.table(pass_, "full") is None:
            continue
        if candidate.block_sets:
            found = _as_sets(pieces, tasks, costs, candidate, pass_, factor)
        else:
            rectangles = rectangles or _rectangles(pieces, tasks)
            found = _as_rectangles(*rectangles, costs, candidate, pass_, factor)
        least = np.minimum(least, found)
    _refuse_unserved(least, pieces, kernels, pass_)
    busy = np.zeros(tasks, dtype=bool)
    busy[pieces.task] = True
    return np.where(busy, least, 0.0)


def _refuse_unserved(
    least: Floats, pieces: _Pieces, kernels: tuple[Kernel, ...], pass_: str
) -> None:
    lost = np.isinf(least[pieces.task])
    if lost.any():
        names = ", ".join(k.name for k in kernels) or "none"
        kind = "partial" if (pieces.kind[lost] == PARTIAL).any() else "full"
        raise InputError(
            f"no costs of {kind} blocks in the {pass_} pass (kernels: {names}); {HOW_TO_MEASURE}"
        )


@dataclass(frozen=True)
class _Pieces:
    """Parts of tiles: columns of equal length. Extents are positions, sizes are tokens."""

    task: Ints
    kind: Ints
    h0: Ints
    h1: Ints
    q0: Ints
    q1: Ints
    k0: Ints
    k1: Ints
    q_tokens: Ints
    kv_tokens: Ints
    weight: Ints

    @staticmethod
    def of(q_layout: Layout, kv_layout: Layout, program: Program) -> _Pieces:
        tile, blocks = program.tasks.tile, program.blocks
        task = tile.row_of
        at = tile.items
        q, kv = blocks.q_chunk[at], blocks.kv_chunk[at]
        q_at, kv_at = _place(q_layout)[q], _place(kv_layout)[kv]
        return _Pieces(
            task, blocks.kind[at], blocks.head_start[at], blocks.head_stop[at],
            q_at, q_at + 1, kv_at, kv_at + 1,
            q_layout.chunks.sizes()[q], kv_layout.chunks.sizes()[kv], blocks.weight[at],
        )  # fmt: skip

    @property
    def heads(self) -> Ints:
        return self.h1 - self.h0

    @property
    def area(self) -> Ints:
        """(query, key) pairs times heads, visible or not."""
        area: Ints = self.q_tokens * self.kv_tokens * self.heads
        return area

    def take(self, index: Ints) -> _Pieces:
        return _Pieces(*(getattr(self, name)[index] for name in self.__dataclass_fields__))

    def joined(self, start: str, stop: str, size: str | None) -> _Pieces:
        """Joins pieces that differ in one extent only and touch there."""
        names = [n for n in self.__dataclass_fields__ if n not in (start, stop, "weight")]
        same = [n for n in names if n != size]
        columns = [getattr(self, n) for n in same]
        order = np.lexsort((getattr(self, start), *columns))
        p = self.take(order)
        breaks = getattr(p, start)[1:] != getattr(p, stop)[:-1]
        for n in same:
            column = getattr(p, n)
            breaks |= column[1:] != column[:-1]
        first = np.flatnonzero(np.concatenate(([True], breaks)))
        last = np.concatenate((first[1:], [len(order)])) - 1
        out = {n: getattr(p, n)[first] for n in names}
        out[start], out[stop] = getattr(p, start)[first], getattr(p, stop)[last]
        out["weight"] = np.add.reduceat(p.weight, first)
        if size is not None:
            out[size] = np.add.reduceat(getattr(p, size), first)
        return _Pieces(**out)


def _place(layout: Layout) -> Ints:
    """Where each chunk stands when every rank's chunks lie side by side, rank after rank."""
    order = np.array([c for owned in layout.owned for c in owned], dtype=np.int64)
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    return place


def _rectangles(pieces: _Pieces, tasks: int) -> tuple[_Pieces, Floats]:
    """The launches of rectangle kernels, and how many each task needs."""
    has_rows = pieces.take(np.flatnonzero(pieces.area > 0))
    whole = has_rows.take(np.flatnonzero(has_rows.kind == FULL))
    other = has_rows.take(np.flatnonzero(has_rows.kind != FULL))
    launches = np.zeros(tasks)
    if len(whole.task):
        whole = whole.joined("h0", "h1", None)
        rows = whole.joined("k0", "k1", "kv_tokens")
        whole = rows.joined("q0", "q1", "q_tokens")
        launches += np.bincount(whole.task, minlength=tasks)
        launches -= _causal_ends(rows, other, tasks)
    launches += np.bincount(other.task, minlength=tasks)
    both = _Pieces(
        *(
            np.concatenate((getattr(whole, n), getattr(other, n)))
            for n in _Pieces.__dataclass_fields__
        )
    )
    return both, launches


def _causal_ends(rows: _Pieces, other: _Pieces, tasks: int) -> Ints:
    """Bands that continue a full run of their row: part of its launch."""
    ends = set(
        zip(*(x.tolist() for x in (rows.task, rows.h0, rows.h1, rows.q0, rows.k1)), strict=True)
    )
    starts = zip(
        *(x.tolist() for x in (other.task, other.h0, other.h1, other.q0, other.k0)), strict=True
    )
    band = (other.kind != PARTIAL).tolist()
    found = [key[0] for key, ok in zip(starts, band, strict=True) if ok and key in ends]
    counts: Ints = np.bincount(np.array(found, dtype=np.int64), minlength=tasks)
    return counts


def _as_rectangles(
    pieces: _Pieces, launches: Floats, costs: Costs, kernel: Kernel, pass_: str, factor: float
) -> Floats:
    odd = pieces.kind == PARTIAL
    seconds = launches * kernel.start_s(pass_)
    servable = ~odd | _serves_partial(kernel, pass_)
    p = pieces.take(np.flatnonzero(servable))
    if len(p.task):
        # Few shapes stand for many pieces: tables are read once a shape.
        first, shape = _distinct(p.q_tokens, p.kv_tokens, p.heads, p.weight, p.kind == PARTIAL)
        one = p.take(first)
        bodies = costs.bodies(
            kernel, pass_, one.q_tokens, one.kv_tokens, one.heads, one.weight / one.area,
            one.kind == PARTIAL, factor,
        )[shape]  # fmt: skip
        seconds = seconds + np.bincount(p.task, weights=bodies, minlength=len(launches))
    seconds[pieces.task[~servable]] = np.inf
    return seconds


def _distinct(*columns: npt.NDArray[Any]) -> tuple[Ints, Ints]:
    """A row of each kind, and of every row which kind it is."""
    kind = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        known, number = np.unique(column, return_inverse=True)
        kind = kind * len(known) + number
        if len(known) > 1:
            kind = np.unique(kind, return_inverse=True)[1].astype(np.int64)
    _, first = np.unique(kind, return_index=True)
    return first.astype(np.int64), kind


def _as_sets(
    pieces: _Pieces, tasks: int, costs: Costs, kernel: Kernel, pass_: str, factor: float
) -> Floats:
    """One launch a task: as many rows as its query chunks, as many pairs as its blocks."""

    def total(weights: Ints) -> Floats:
        return np.bincount(pieces.task, weights=weights, minlength=tasks).astype(np.float64)

    spread = np.zeros(tasks, dtype=np.int64)
    np.maximum.at(spread, pieces.task, pieces.heads)
    columns = np.stack((pieces.task, pieces.q0, pieces.h0, pieces.h1))
    _, first = np.unique(columns, axis=1, return_index=True)
    rows = np.bincount(
        pieces.task[first],
        weights=(pieces.q_tokens * pieces.heads)[first],
        minlength=tasks,
    )
    area, weight = total(pieces.area), total(pieces.weight)
    odd = total(np.where(pieces.kind == PARTIAL, pieces.weight, 0))
    busy = np.flatnonzero(area > 0)
    seconds = np.zeros(tasks)
    q = np.maximum(rows[busy] / spread[busy], 1.0)
    kv = np.maximum(area[busy] / (q * spread[busy]), 1.0)
    measured = kernel.table(pass_, "partial") is not None
    share, partial = weight[busy] / area[busy], (odd[busy] > 0) & measured
    bodies = costs.bodies(kernel, pass_, q, kv, spread[busy], share, partial)
    if not measured:
        more = (kernel.partial_over_full or 1.0) - 1.0
        bodies = bodies * (1.0 + more * odd[busy] / np.maximum(weight[busy], 1.0))
    seconds[busy] = kernel.start_s(pass_) + bodies * factor
    if not _serves_partial(kernel, pass_):
        seconds[odd > 0] = np.inf
    return seconds


def _serves_partial(kernel: Kernel, pass_: str) -> bool:
    return kernel.partial_over_full is not None or kernel.table(pass_, "partial") is not None


def copy_seconds(program: Program, sizes: Ints, costs: Costs) -> Floats:
    """Seconds of every merge and local task, by the bytes it reads and writes: (tasks,)."""
    tasks = len(program.tasks.rank)
    moved = np.zeros(tasks)
    for ragged in (program.tasks.reads, program.tasks.writes):
        moved += np.bincount(ragged.row_of, weights=sizes[ragged.items], minlength=tasks)
    codes = [TASK_ORDER.index(kind) for kind in (TaskKind.MERGE, TaskKind.LOCAL)]
    return np.where(np.isin(program.tasks.kind, codes), costs.copy_seconds(moved), 0.0)
