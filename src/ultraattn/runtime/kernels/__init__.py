"""Turns the blocks of a tile into kernel calls: which kernel serves which, and the calls."""

from __future__ import annotations

from ultraattn.runtime.kernels.base import Kernel, Piece
from ultraattn.runtime.kernels.rows import (
    KERNELS,
    NAMES,
    backward_row,
    check_name,
    choose,
    forward_row,
)

__all__ = [
    "KERNELS",
    "NAMES",
    "Kernel",
    "Piece",
    "backward_row",
    "check_name",
    "choose",
    "forward_row",
]
