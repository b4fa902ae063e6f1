"""Computes with rectangles of rows and heads within a chunk."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ultraattn.plans.program import Value

Region = tuple[int, int, int, int]
"""row_start, row_stop, head_start, head_stop."""


def region_of(value: Value) -> Region:
    """Where a value stands within its chunk."""
    return value.row_start, value.row_stop, value.head_start, value.head_stop


def area(region: Region) -> int:
    """Rows times heads."""
    return max(0, region[1] - region[0]) * max(0, region[3] - region[2])


def overlap(a: Region, b: Region) -> Region:
    """What both hold; of area 0 where that is nothing."""
    return max(a[0], b[0]), min(a[1], b[1]), max(a[2], b[2]), min(a[3], b[3])


def atoms(region: Region, pieces: Sequence[Region]) -> list[Region]:
    """Cuts `region` along the edges of all pieces; within an atom each piece is all or nothing."""
    if all(piece == region for piece in pieces):
        return [region]
    rows = sorted({region[0], region[1]} | {r for p in pieces for r in p[:2]})
    heads = sorted({region[2], region[3]} | {h for p in pieces for h in p[2:]})
    cells = [
        (a, b, c, d) for a, b in itertools.pairwise(rows) for c, d in itertools.pairwise(heads)
    ]
    return [cell for cell in cells if area(overlap(cell, region))]


def covered(region: Region, pieces: Sequence[Region]) -> bool:
    """Whether pieces, overlapping or not, leave nothing of the region out."""
    if not area(region) or any(overlap(piece, region) == region for piece in pieces):
        return True
    return all(
        any(area(overlap(atom, piece)) for piece in pieces) for atom in atoms(region, pieces)
    )
