"""Draws a mask in the terminal: one character pair a block, darker where more of it is visible."""

from __future__ import annotations

import sys

import numpy as np

from ultraattn.chunks import split
from ultraattn.masks.base import Lengths, Mask

SHADES = " ░▒▓█"


def draw(mask: Mask, lengths: Lengths | None = None, parts: int = 32) -> str:
    """The mask over `parts` x `parts` blocks, queries down and keys across, as lines of text.

    Without `lengths`, 8 tokens a part on both axes. Of a mask that varies by head, head 0.
    """
    lengths = lengths or Lengths(8 * parts, 8 * parts)
    grid = mask.grid(split(lengths.q, parts), split(lengths.kv, parts))
    area = grid.q_chunks.sizes()[:, None] * grid.kv_chunks.sizes()[None, :]
    seen = grid.weights[0, 0]
    # Any visible pair shows, and only a full block is solid.
    steps = len(SHADES) - 1
    shade = np.where(
        seen == area, steps, np.clip(seen * steps // np.maximum(area, 1), 1, steps - 1)
    )
    shade[seen == 0] = 0
    body = ["│" + "".join(2 * SHADES[s] for s in row) + "│" for row in shade.tolist()]
    rule = "─" * (2 * parts)
    total = int(area.sum())
    share = 100 * int(seen.sum()) / total if total else 0.0
    title = f"{mask}: {lengths}, {share:.2f} % visible"
    return "\n".join([title, f"┌{rule}┐", *body, f"└{rule}┘"])


def show(mask: Mask, lengths: Lengths | None = None, parts: int = 32) -> None:
    """Writes `draw` to standard output."""
    sys.stdout.write(draw(mask, lengths, parts) + "\n")
