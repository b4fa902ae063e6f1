"""Gives the kernels of this package Triton where it is installed, and stand-ins where it is not.

Modules with Triton kernels import everywhere; a kernel that is launched without Triton raises.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
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


def kernel(function: Callable[..., None] | None = None, *, any_value: Sequence[str] = ()) -> Any:
    """`triton.jit`, or a stand-in that raises when it is launched.

    Args:
        function: the kernel; None to make a decorator.
        any_value: arguments whose value (1, a multiple of 16) gets no kernel of its own.
    """
    if function is None:
        return functools.partial(kernel, any_value=any_value)
    if triton is None:
        return _Missing(function)
    return triton.jit(function, do_not_specialize=list(any_value))
