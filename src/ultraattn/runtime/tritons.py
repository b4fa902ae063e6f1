"""Gives the kernels of this package Triton where it is installed, and stand-ins where it is not.

Modules with Triton kernels import everywhere; a kernel that is launched without Triton raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ultraattn.errors import MissingExtraError

__all__ = ["has_triton", "kernel", "tl"]

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None
    tl = None


def has_triton() -> bool:
    """Whether Triton can be imported."""
    return triton is not None


class _Language:
    """Takes the place of `triton.language` in signatures where Triton is missing."""

    constexpr = Any


class _Missing:
    """Takes the place of a Triton kernel."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._name = function.__name__

    def __getitem__(self, grid: Any) -> Any:
        raise MissingExtraError(
            f"kernel {self._name} needs Triton, which is not installed; pip install triton (it "
            "comes with PyTorch's CUDA builds)"
        )


if tl is None:
    tl = _Language()


def kernel(function: Callable[..., None]) -> Any:
    """`triton.jit`, or a stand-in that raises when it is launched."""
    return _Missing(function) if triton is None else triton.jit(function)
