"""Turns (mask, shape, layouts) into where a plan starts from: the grid and the problem."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ultraattn.chunks import Ints
from ultraattn.errors import InputError
from ultraattn.masks import BlockKind, Grid, Mask
from ultraattn.planning.blocks import blocks_of
from ultraattn.planning.degree import DEFAULT_ETA, imbalance
from ultraattn.planning.layout import LayoutName, layout_by_name
from ultraattn.planning.layout_search import fetched
from ultraattn.plans.layout import Layout
from ultraattn.plans.problem import Problem
from ultraattn.plans.program import Block
from ultraattn.plans.storage import canonical

T = TypeVar("T")

MOST_CHUNKS = 128
"""The default partition degree grows no further (a layout's least degree is always allowed)."""


FACTORS = (1, 2, 4, 8, 16)
FEW_CHUNKS = 32
"""The last factor serves few ranks only."""

MOST_PARTIAL = Fraction(1, 8)
"""The share of the work that may lie in PARTIAL blocks before a finer degree is tried."""

USELESS = Fraction(1, 4)
"""The share of what is fetched that may be seen by nobody before a finer degree is tried."""


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
    _made: dict[Hashable, Any] = field(default_factory=dict)

    @property
    def places(self) -> tuple[Any, ...]:
        """Chunks and their owners: equal for settings that differ in name only."""
        return tuple((x.chunks, x.owners) for x in (self.q_layout, self.kv_layout))

    def blocks(self, groups: int) -> list[Block]:
        """The visible blocks with heads in `groups` ranges; not to be written to."""
        return self.once(
            ("blocks", groups), lambda: blocks_of(self.grid, self.problem.heads, groups)
        )

    def once(self, name: Hashable, make: Callable[[], T]) -> T:
        """What `make` gives, made once: what knows no costs serves clusters of any costs."""
        if name not in self._made:
            self._made[name] = make()
        known: T = self._made[name]
        return known


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


def with_less_to_fetch(make: Callable[[int], Setting], made: Setting) -> list[Setting]:
    """Finer settings whose row owners fetch clearly fewer keys; none where there are none.

    Whole chunks travel: a window of 4,096 tokens over 2 chunks of 32k moves 32k keys where 4,095
    are needed. But smaller launches take longer, so two degrees are offered: the smallest that
    fetches almost as little as any, and one halfway there. `make` gives the setting for a number
    of chunks, `made` is the one to start from.
    """
    if made.q_layout != made.kv_layout or _useless_at_most(made) <= USELESS:
        return []
    least = len(made.q_layout.chunks)
    tried = [made, *(make(least * f) for f in FACTORS[1:] if least * f <= MOST_CHUNKS)]
    rows = [_fetched(each) for each in tried]
    if min(rows) > (1 - USELESS) * rows[0]:
        return []
    last = next(at for at, count in enumerate(rows) if count * (1 - USELESS) <= min(rows))
    return [tried[at] for at in sorted({(last + 1) // 2, last})]


def _visible(made: Setting) -> npt.NDArray[np.bool_]:
    visible: npt.NDArray[np.bool_] = made.grid.kinds[0].any(axis=0)
    return visible


def _fetched(made: Setting) -> int:
    """Key rows that row owners fetch in whole chunks."""
    owners = np.array(made.q_layout.owners, dtype=np.int64)
    return fetched(owners, made.q_layout.chunks.sizes(), _visible(made), made.q_layout.ranks)


def _useless_at_most(made: Setting) -> Fraction:
    """Of the key rows that row owners fetch, the share that no query of theirs may see.

    A block of w visible pairs and q queries needs at least w / q of its keys.
    """
    sizes, ranks = made.q_layout.chunks.sizes(), made.q_layout.ranks
    owners = np.array(made.q_layout.owners, dtype=np.int64)
    needed = -(-made.grid.weights[0].max(axis=0) // np.maximum(sizes, 1)[:, None])
    used = np.zeros((ranks, len(sizes)), dtype=np.int64)
    np.maximum.at(used, owners, needed)
    used[owners, np.arange(len(sizes))] = 0
    moved = _fetched(made)
    return 1 - Fraction(int(used.sum()), moved) if moved else Fraction(0)


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
