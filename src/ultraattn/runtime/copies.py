"""Copies tensors of any strides on CUDA with the copy engine where they are rows of bytes.

A strided copy of PyTorch is a kernel, which takes SMs from attention. A chunk of some heads is rows
of bytes at a pitch, (batch x tokens) of (heads x head_dim), and the engine copies such rectangles.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from typing import Any

import torch
from torch import Tensor

from ultraattn.errors import RunError

UNIFIED = 4
"""CU_MEMORYTYPE_UNIFIED: the address says whose memory it is."""
LEAST_BYTES = 512
"""Shorter rows are copied by a kernel."""

logger = logging.getLogger(__name__)
_without_rows: set[torch.device] = set()
"""Devices whose driver refused such a copy; transports try one before the first call."""


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = [
        (f"{end}_{name}", kind)
        for end in ("src", "dst")
        for name, kind in (
            ("x", ctypes.c_size_t), ("y", ctypes.c_size_t), ("type", ctypes.c_int),
            ("host", ctypes.c_void_p), ("device", ctypes.c_uint64), ("array", ctypes.c_void_p),
            ("pitch", ctypes.c_size_t),
        )
    ] + [("width", ctypes.c_size_t), ("height", ctypes.c_size_t)]  # fmt: skip


@functools.cache
def driver() -> Any:
    """The CUDA driver's library."""
    return ctypes.CDLL("libcuda.so.1")


def check(code: int, what: str) -> None:
    """Raises RunError unless a call of the driver succeeded."""
    if code:
        raise RunError(f"{what} failed with CUDA driver error {code}")


def copy(target: Tensor, source: Tensor) -> None:
    """Copies on the current stream, casting where dtypes differ."""
    if target.device.type != "cuda" or target.dtype != source.dtype or not target.numel():
        target.copy_(source)
        return
    rows = None if target.device in _without_rows else as_rows(target, source)
    if rows is None:
        target.copy_(source)
        return
    height, width, to_pitch, from_pitch = rows
    order = _Copy2D(
        src_type=UNIFIED, src_device=source.data_ptr(), src_pitch=from_pitch,
        dst_type=UNIFIED, dst_device=target.data_ptr(), dst_pitch=to_pitch,
        width=width, height=height,
    )  # fmt: skip
    stream = ctypes.c_void_p(torch.cuda.current_stream(target.device).cuda_stream)
    code = driver().cuMemcpy2DAsync_v2(ctypes.byref(order), stream)
    if code:
        logger.warning("copying rows: CUDA driver error %d; kernels copy them from now on", code)
        _without_rows.add(target.device)
        target.copy_(source)


def as_rows(target: Tensor, source: Tensor) -> tuple[int, int, int, int] | None:
    """Both tensors as rows of bytes: how many, how long, and the pitches; None where they are not.

    Contiguous tensors need no such copy: PyTorch hands them to the engine itself.
    """
    dims = sorted(
        (dim for dim in range(target.ndim) if target.shape[dim] > 1),
        key=lambda dim: -target.stride()[dim],
    )
    merged: list[tuple[int, int, int]] = []
    for dim in reversed(dims):
        size, a, b = target.shape[dim], target.stride()[dim], source.stride()[dim]
        if merged and (a, b) == (merged[-1][0] * merged[-1][1], merged[-1][0] * merged[-1][2]):
            merged[-1] = merged[-1][0] * size, *merged[-1][1:]
        else:
            merged.append((size, a, b))
    if len(merged) != 2 or merged[0][1:] != (1, 1):
        return None
    bytes_each = target.element_size()
    (width, _, _), (height, to_pitch, from_pitch) = merged
    width, to_pitch, from_pitch = (x * bytes_each for x in (width, to_pitch, from_pitch))
    if width < LEAST_BYTES or min(to_pitch, from_pitch) < width:
        return None
    return height, width, to_pitch, from_pitch
