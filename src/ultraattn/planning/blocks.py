"""Turns a mask's grid into the blocks of a pass: one for each visible cell and head range."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from ultraattn.chunks import Ints
from ultraattn.errors import InputError
from ultraattn.masks.grid import KIND_ORDER, BlockKind, Grid
from ultraattn.plans.head_ranges import HeadRange
from ultraattn.plans.program import Block


def head_ranges(heads: int, groups: int) -> tuple[HeadRange, ...]:
    """`groups` ranges with edges ``floor(g * heads / groups)``.

    Raises:
        InputError: more ranges than heads.
    """
    if not 1 <= groups <= heads:
        raise InputError(
            f"head_groups {groups} of {heads} heads: expected 1 to {heads}, since a range holds at "
            "least one head"
        )
    cuts = [g * heads // groups for g in range(groups + 1)]
    return tuple(itertools.pairwise(cuts))


def blocks_of(grid: Grid, heads: int, groups: int = 1) -> list[Block]:
    """The visible blocks, ordered by (query chunk, key chunk, head range).

    Where the mask varies by head, a range is cut further, so that all heads of a block see the
    same pairs.
    """
    kinds, lo, hi, weights = (x[0] for x in (grid.kinds, grid.lo, grid.hi, grid.weights))
    ranges = head_ranges(heads, groups)
    if grid.heads not in (1, heads):
        raise InputError(
            f"the mask has {grid.heads} heads, the problem {heads}; make the mask for the same "
            "number of query heads"
        )
    if grid.heads == 1:
        q, k = np.nonzero(kinds[0])
        return [
            Block(i, j, a, b, KIND_ORDER[kind], low, high, weight * (b - a))
            for i, j, kind, low, high, weight in zip(
                q.tolist(),
                k.tolist(),
                kinds[0, q, k].tolist(),
                lo[0, q, k].tolist(),
                hi[0, q, k].tolist(),
                weights[0, q, k].tolist(),
                strict=True,
            )
            for a, b in ranges
        ]
    blocks = []
    q, k = np.nonzero(kinds.any(axis=0))
    for i, j in zip(q.tolist(), k.tolist(), strict=True):
        for a, b in _same_heads((kinds[:, i, j], lo[:, i, j], hi[:, i, j]), ranges):
            kind = KIND_ORDER[int(kinds[a, i, j])]
            if kind is not BlockKind.EMPTY:
                weight = int(weights[a:b, i, j].sum())
                limits = int(lo[a, i, j]), int(hi[a, i, j])
                blocks.append(Block(i, j, a, b, kind, *limits, weight))
    return blocks


def _same_heads(columns: Sequence[Ints], ranges: Sequence[HeadRange]) -> list[HeadRange]:
    """Cuts ranges where one head's block is not another's; PARTIAL blocks carry a mask by head."""
    out = []
    for start, stop in ranges:
        at = start
        for head in range(start + 1, stop + 1):
            if head == stop or any(column[head] != column[at] for column in columns):
                out.append((at, head))
                at = head
    return out
