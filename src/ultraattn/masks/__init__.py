"""What to compute: token-level masks, and the grids of blocks they show over chunks."""

from __future__ import annotations

import sys
import warnings

if sys.argv[:1] == ["-m"]:
    # `python -m ultraattn.masks.NAME` draws a mask; that this package imports it first is no news.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")

from ultraattn.masks.base import CellKind, Lengths, Mask
from ultraattn.masks.causal import causal
from ultraattn.masks.document import document
from ultraattn.masks.draw import draw
from ultraattn.masks.from_block_mask import from_block_mask
from ultraattn.masks.from_blocks import from_blocks
from ultraattn.masks.from_mask_mod import from_mask_mod
from ultraattn.masks.from_ranges import RangeKind, from_ranges
from ultraattn.masks.full import full
from ultraattn.masks.global_local import global_local
from ultraattn.masks.grid import OPEN_HI, OPEN_LO, BlockKind, Grid
from ultraattn.masks.registry import NAMES, by_name, from_spec
from ultraattn.masks.sliding_window import sliding_window
from ultraattn.masks.star import star
from ultraattn.masks.streaming import streaming
from ultraattn.masks.strided import strided

__all__ = [
    "NAMES",
    "OPEN_HI",
    "OPEN_LO",
    "BlockKind",
    "CellKind",
    "Grid",
    "Lengths",
    "Mask",
    "RangeKind",
    "by_name",
    "causal",
    "document",
    "draw",
    "from_block_mask",
    "from_blocks",
    "from_mask_mod",
    "from_ranges",
    "from_spec",
    "full",
    "global_local",
    "sliding_window",
    "star",
    "streaming",
    "strided",
]
