"""Turns (mask, shape, layouts) into where a plan starts from: the grid and the problem."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from ultraattn.chunks import Ints
from ultraattn.errors import InputError
from ultraattn.masks import BlockKind, Grid, Mask
from ultraattn.planning.blocks import blocks_of
from ultraattn.planning.degree import DEFAULT_ETA, imbalance
from ultraattn.planning.layout import LayoutName, layout_by_name
from ultraattn.plans.layout import Layout
from ultraattn.plans.problem import Problem
from ultraattn.plans.program import Block
from ultraattn.plans.storage import canonical

MOST_CHUNKS = 128
"""The default partition degree grows no further (a layout's least degree is always allowed)."""


FACTORS = (1, 2, 4, 8, 16)
FEW_CHUNKS = 32
"""The last factor serves few ranks only."""

MOST_PARTIAL = Fraction(1, 8)
"""The share of the work that may lie in PARTIAL blocks before a finer degree is tried."""


@dataclass(frozen=True)
class Shape:
    """The sizes of one attention, as the caller gave them."""

    q_len: int
    kv_len: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: str
    scale: float


@dataclass(frozen=True, eq=False)
class Setting:
    """Layouts, and the mask's grid over their chunks."""

    mask: Mask
    q_layout: Layout
    kv_layout: Layout
    grid: Grid
    problem: Problem
    _blocks: dict[int, list[Block]] = field(default_factory=dict)

    def blocks(self, groups: int) -> list[Block]:
        """The visible blocks with heads in `groups` ranges; made once, not to be written to."""
        if groups not in self._blocks:
            self._blocks[groups] = blocks_of(self.grid, self.problem.heads, groups)
        return self._blocks[groups]


def setting(mask: Mask, shape: Shape, q_layout: Layout, kv_layout: Layout) -> Setting:
    """The grid of a mask over the chunks of two layouts, and the problem that a plan states."""
    grid = mask.grid(q_layout.chunks, kv_layout.chunks, heads=shape.heads)
    problem = Problem(
        mask=canonical(mask.spec()) if mask.savable else "",
        mask_label=str(mask),
        mask_digest=grid.digest(),
        visible_pairs=visible_pairs(grid, shape.heads),
        q_len=shape.q_len,
        kv_len=shape.kv_len,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        value_dim=shape.value_dim,
        dtype=shape.dtype,
        scale=shape.scale,
    )
    return Setting(mask, q_layout, kv_layout, grid, problem)


def nominal_weights(made: Setting) -> tuple[Ints, int]:
    """The mask's nominal weights over the layouts' chunks, and their denominator."""
    names = {made.q_layout.name, made.kv_layout.name}
    if not names <= {"contiguous", "zigzag", "remapped"}:
        raise InputError(
            f"units 'paper' with layout {made.q_layout.name!r}: its weights are of contiguous "
            "chunks; use layout contiguous, zigzag or remapped, or units 'bytes'"
        )
    return made.mask.nominal(
        len(made.q_layout.chunks),
        len(made.kv_layout.chunks),
        remapped=made.q_layout.name == "remapped",
    )


def visible_pairs(grid: Grid, heads: int) -> int:
    """Visible (query, key) pairs over all query heads."""
    total = int(grid.weights[0].sum())
    return total * heads if grid.heads == 1 else total


def default_layout(
    name: str, mask: Mask, length: int, ranks: int, chunks: int | None, align: int
) -> Layout:
    """The layout called `name` for a mask; "auto" is the mask's own remap, else contiguous."""
    order = mask.cell_order()
    if name == LayoutName.AUTO:
        name = LayoutName.CONTIGUOUS if order is None else LayoutName.REMAPPED
    return layout_by_name(name, length, ranks, order=order, chunks=chunks, align=align)


def at_level_degree(make: Callable[[int | None], Setting], eta: Fraction = DEFAULT_ETA) -> Setting:
    """The setting at the smallest partition degree that serves (design, Partition degree).

    `make` gives the setting for a number of chunks, or for the layout's least where None. A degree
    serves when whole blocks can be level to within `eta` (U(P)), or row owners already are, and
    when little of the work lies in PARTIAL blocks, which the fast kernels do not take: on an
    H200 the kernel that does runs at a third of cuDNN's rate (benchmarks/results/gpu_kernels.json).
    Where none serves, the degree with the least of both is taken.
    """
    first = make(None)
    least = max(1, len(first.q_layout.chunks))
    tried: list[tuple[Fraction, int, Setting]] = []
    for factor in FACTORS:
        degree = least * factor
        if factor > 1 and degree > (MOST_CHUNKS if factor <= 8 else FEW_CHUNKS):
            break
        made = first if factor == 1 else make(degree)
        uneven = max(min(_uneven(made), uneven_rows(made)) - eta, Fraction(0))
        partial = max(_partial_share(made) - MOST_PARTIAL, Fraction(0))
        if not uneven and not partial:
            return made
        tried.append((uneven + partial, len(tried), made))
    return min(tried, key=lambda each: each[:2])[2]


def _partial_share(made: Setting) -> Fraction:
    """The share of the visible pairs that lies in PARTIAL blocks."""
    weights = made.grid.weights[0]
    total = int(weights.sum())
    partial = int(weights[made.grid.kinds[0] == BlockKind.PARTIAL.code].sum())
    return Fraction(partial, total) if total else Fraction(0)


def _uneven(made: Setting) -> Fraction:
    """U(P) with the mask's nominal weight, or its share of all pairs where it has none."""
    rows, columns = len(made.q_layout.chunks), len(made.kv_layout.chunks)
    try:
        table, full = made.mask.nominal(rows, columns)
        weight = Fraction(int(table.sum()), full)
    except InputError:
        pairs = made.problem.q_len * made.problem.kv_len * made.problem.heads
        weight = Fraction(made.problem.visible_pairs * rows * columns, max(1, pairs))
    return imbalance(weight, made.q_layout.ranks)


def uneven_rows(made: Setting) -> Fraction:
    """How far the busiest row owner is above the mean."""
    load = np.zeros(made.q_layout.ranks, dtype=np.int64)
    rows = made.grid.weights[0].sum(axis=(0, 2))
    np.add.at(load, np.array(made.q_layout.owners, dtype=np.int64), rows)
    total = int(load.sum())
    return Fraction(int(load.max()) * len(load), total) - 1 if total else Fraction(0)
