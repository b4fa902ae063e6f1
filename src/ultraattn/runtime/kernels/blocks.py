"""Turns a piece into rectangles that each hold a few rows and only keys some of them may see.

Trimming a band to the rows and columns it touches often leaves a plain shape. Here i - j >= 2 over
5 rows and 4 keys (x visible) becomes a corner-to-corner triangle of 3 x 3, and no row is dead:

    . . . .
    . . . .
    x . . .        x . .
    x x . .   ->   x x .
    x x x .        x x x
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ultraattn.masks.grid import OPEN_HI, OPEN_LO, BlockKind
from ultraattn.runtime.kernels.base import Piece


@dataclass(frozen=True)
class Rectangle:
    """Rows [top, bottom) and keys [left, right) of a piece, and the band within them.

    Query i and key j, counted from the rectangle's own corner, see each other iff
    lo <= i - j <= hi (and the piece's mask allows it, for PARTIAL).
    """

    top: int
    bottom: int
    left: int
    right: int
    lo: int = OPEN_LO
    hi: int = OPEN_HI

    @property
    def rows(self) -> int:
        """Number of queries."""
        return self.bottom - self.top

    @property
    def cols(self) -> int:
        """Number of keys."""
        return self.right - self.left

    @property
    def full(self) -> bool:
        """Whether the band holds every pair."""
        return self.lo <= 1 - self.cols and self.hi >= self.rows - 1

    @property
    def causal(self) -> bool:
        """Whether query i sees the keys j <= i, and no others."""
        return self.lo == 0 and self.hi >= self.rows - 1

    def take(self, top: int, bottom: int) -> Rectangle:
        """Rows [top, bottom) of it, counted from its own top, with the same keys."""
        lo = self.lo if self.lo <= OPEN_LO else self.lo - top
        hi = self.hi if self.hi >= OPEN_HI else self.hi - top
        return replace(self, top=self.top + top, bottom=self.top + bottom, lo=lo, hi=hi)

    def trim(self) -> Rectangle:
        """The smallest rectangle with the same pairs; it has no rows if there are none."""
        top, bottom = max(0, self.lo), min(self.rows, self.hi + self.cols)
        left, right = max(0, -self.hi), min(self.cols, self.rows - self.lo)
        if top >= bottom or left >= right or self.lo > self.hi:
            return Rectangle(self.top, self.top, self.left, self.left)
        lo = self.lo if self.lo <= OPEN_LO else self.lo - top + left
        hi = self.hi if self.hi >= OPEN_HI else self.hi - top + left
        return Rectangle(
            self.top + top, self.top + bottom, self.left + left, self.left + right, lo, hi
        )


def rectangles(piece: Piece, rows: int, band_rows: int, mask_rows: int) -> Iterator[Rectangle]:
    """Cuts a piece of `rows` queries into rectangles that together hold its visible pairs once.

    Args:
        piece: of any kind.
        rows: number of queries.
        band_rows: rows at a time of a band that is neither full nor causal once trimmed; fewer
            rows, fewer pairs that are computed to be masked.
        mask_rows: rows at a time of a PARTIAL piece.
    """
    whole = Rectangle(0, rows, 0, piece.cols)
    if piece.kind is BlockKind.EMPTY or rows == 0 or piece.cols == 0:
        return
    if piece.kind is BlockKind.FULL:
        yield whole
        return
    step = mask_rows
    if piece.kind is BlockKind.BAND:
        whole = replace(whole, lo=piece.lo, hi=piece.hi).trim()
        step = whole.rows if whole.full or whole.causal else band_rows
    for top in range(0, whole.rows, max(1, step)):
        part = whole.take(top, min(whole.rows, top + max(1, step))).trim()
        if part.rows:
            yield part


def visible(piece: Piece, part: Rectangle, heads: slice = slice(None)) -> Tensor | None:
    """Bool (1 or heads, part.rows, part.cols) of what `part` sees; None for everything."""
    if piece.kind is BlockKind.PARTIAL and piece.mask is not None:
        mask = piece.mask if piece.mask.shape[0] == 1 else piece.mask[heads]
        return mask[:, part.top : part.bottom, part.left : part.right].to(piece.k.device)
    if part.full:
        return None
    i = torch.arange(part.rows, device=piece.k.device)[:, None]
    distance = i - torch.arange(part.cols, device=piece.k.device)
    return ((distance >= part.lo) & (distance <= part.hi))[None]
