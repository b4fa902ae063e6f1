"""Merges, sums and deltas on CUDA in one pass: every input is read once, the result written once.

The formulas are those of `ultraattn.runtime.merge` and `ultraattn.runtime.reduce`, which call these
where they can: with Triton, on CUDA, up to `MOST` parts, nothing in float64. Tensors are (batch,
heads, rows, dim), LSEs and deltas (batch, heads, rows), all of any strides.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton reads the annotations of its kernels.)
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ultraattn.runtime.tritons import has_triton, kernel, tl

MOST = 16
ROWS = 16


def can_fold(*tensors: Tensor) -> bool:
    """Whether the functions here take these tensors."""
    return (
        tensors[0].device.type == "cuda"
        and has_triton()
        and len(tensors) <= 2 * MOST
        and all(0 < x.numel() < 2**31 and x.dtype != torch.float64 for x in tensors)
    )


def fold(
    outs: Sequence[Tensor], lses: Sequence[Tensor], out: Tensor, lse_out: Tensor
) -> tuple[Tensor, Tensor]:
    """Writes the merged O and LSE of parts into `out` and `lse_out`."""
    _fold_kernel[_grid(out)](
        tuple(outs), tuple(lses), out, lse_out, *out.shape[1:3],
        _strides(outs), _strides(lses), out.stride(), lse_out.stride(),
        len(outs), *_width(out), ROWS,
    )  # fmt: skip
    return out, lse_out


def add(parts: Sequence[Tensor], out: Tensor) -> Tensor:
    """Writes the sum of parts, made in float32 in their order, into `out`."""
    _add_kernel[_grid(out)](
        tuple(parts), out, *out.shape[1:3], _strides(parts), out.stride(),
        len(parts), *_width(out), ROWS,
    )  # fmt: skip
    return out


def row_dots(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """Writes rowsum(a * b), made in float32, into `out`."""
    _dots_kernel[_grid(a)](
        a, b, out, *a.shape[1:3], a.stride(), b.stride(), out.stride(), *_width(a), ROWS,
    )  # fmt: skip
    return out


def _grid(x: Tensor) -> tuple[int, int]:
    return -(-x.shape[2] // ROWS), x.shape[0] * x.shape[1]


def _width(x: Tensor) -> tuple[int, int]:
    dim = x.shape[3]
    return dim, 1 << (dim - 1).bit_length()


def _strides(parts: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(stride for part in parts for stride in part.stride())


@kernel
def _fold_kernel(
    outs, lses, out, lse_out, heads, rows, p, q, o, s,
    parts: tl.constexpr, dim: tl.constexpr, width: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * block + tl.arange(0, block)).to(tl.int64)
    both = tl.program_id(1)
    b, h = (both // heads).to(tl.int64), (both % heads).to(tl.int64)
    column = tl.arange(0, width)
    live = row < rows
    inside = live[:, None] & (column < dim)[None, :]
    low = float("-inf")
    top = tl.load(lses[0] + b * q[0] + h * q[1] + row * q[2], mask=live, other=low)
    for i in tl.static_range(1, parts):
        at = b * q[3 * i] + h * q[3 * i + 1] + row * q[3 * i + 2]
        top = tl.maximum(top, tl.load(lses[i] + at, mask=live, other=low))
    shift = tl.where(top == low, 0.0, top)
    total = tl.zeros([block], tl.float32)
    summed = tl.zeros([block, width], tl.float32)
    for i in tl.static_range(0, parts):
        at = b * q[3 * i] + h * q[3 * i + 1] + row * q[3 * i + 2]
        lse = tl.load(lses[i] + at, mask=live, other=low)
        weight = tl.exp(lse - shift)
        line = b * p[4 * i] + h * p[4 * i + 1] + row * p[4 * i + 2]
        at = line[:, None] + (column * p[4 * i + 3])[None, :]
        part = tl.load(outs[i] + at, mask=inside, other=0.0).to(tl.float32)
        part = tl.where((lse == low)[:, None], 0.0, part)
        total += weight
        summed += weight[:, None] * part
    divisor = tl.where(total == 0, 1.0, total)
    to = out + (b * o[0] + h * o[1] + row * o[2])[:, None] + (column * o[3])[None, :]
    tl.store(to, (summed / divisor[:, None]).to(out.dtype.element_ty), mask=inside)
    tl.store(lse_out + b * s[0] + h * s[1] + row * s[2], top + tl.log(divisor), mask=live)


@kernel
def _add_kernel(
    parts, out, heads, rows, p, o,
    count: tl.constexpr, dim: tl.constexpr, width: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * block + tl.arange(0, block)).to(tl.int64)
    both = tl.program_id(1)
    b, h = (both // heads).to(tl.int64), (both % heads).to(tl.int64)
    column = tl.arange(0, width)
    inside = (row < rows)[:, None] & (column < dim)[None, :]
    summed = tl.zeros([block, width], tl.float32)
    for i in tl.static_range(0, count):
        line = b * p[4 * i] + h * p[4 * i + 1] + row * p[4 * i + 2]
        at = line[:, None] + (column * p[4 * i + 3])[None, :]
        summed += tl.load(parts[i] + at, mask=inside, other=0.0).to(tl.float32)
    to = out + (b * o[0] + h * o[1] + row * o[2])[:, None] + (column * o[3])[None, :]
    tl.store(to, summed.to(out.dtype.element_ty), mask=inside)


@kernel
def _dots_kernel(
    x, y, out, heads, rows, p, q, o, dim: tl.constexpr, width: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    row = (tl.program_id(0) * block + tl.arange(0, block)).to(tl.int64)
    both = tl.program_id(1)
    b, h = (both // heads).to(tl.int64), (both % heads).to(tl.int64)
    column = tl.arange(0, width)
    inside = (row < rows)[:, None] & (column < dim)[None, :]
    x_at = (b * p[0] + h * p[1] + row * p[2])[:, None] + (column * p[3])[None, :]
    y_at = (b * q[0] + h * q[1] + row * q[2])[:, None] + (column * q[3])[None, :]
    product = tl.load(x + x_at, mask=inside, other=0.0).to(tl.float32)
    product *= tl.load(y + y_at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + b * o[0] + h * o[1] + row * o[2], tl.sum(product, 1), mask=row < rows)
