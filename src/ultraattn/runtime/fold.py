"""Merges partial results on CUDA in one pass: every part is read once, the result written once.

The same formula as `ultraattn.runtime.merge`, which calls this where it can: up to `MOST` parts,
all O of one dtype and with the same strides, all LSEs float32 and with the same strides.
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


def can_fold(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> bool:
    """Whether `fold` takes these parts."""
    first, lse = outs[0], lses[0]
    return (
        first.device.type == "cuda"
        and has_triton()
        and len(outs) <= MOST
        and first.numel() > 0
        and first.dtype != torch.float64
        and all(x.dtype == first.dtype and x.stride() == first.stride() for x in outs)
        and all(x.dtype == torch.float32 and x.stride() == lse.stride() for x in lses)
    )


def fold(
    outs: Sequence[Tensor], lses: Sequence[Tensor], out: Tensor, lse_out: Tensor
) -> tuple[Tensor, Tensor]:
    """Writes the merged O and LSE into `out` and `lse_out` (float32), of any strides."""
    batch, heads, rows, dim = outs[0].shape
    grid = (-(-rows // ROWS), batch * heads)
    _fold_kernel[grid](
        tuple(outs), tuple(lses), out, lse_out, heads, rows,
        *outs[0].stride(), *lses[0].stride(), *out.stride(), *lse_out.stride(),
        len(outs), dim, 1 << (dim - 1).bit_length(), ROWS,
    )  # fmt: skip
    return out, lse_out


@kernel
def _fold_kernel(
    outs, lses, out, lse_out, heads, rows,
    p_b, p_h, p_r, p_d, l_b, l_h, l_r, o_b, o_h, o_r, o_d, s_b, s_h, s_r,
    parts: tl.constexpr, dim: tl.constexpr, width: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * block + tl.arange(0, block)).to(tl.int64)
    both = tl.program_id(1)
    b, h = (both // heads).to(tl.int64), (both % heads).to(tl.int64)
    column = tl.arange(0, width)
    live = row < rows
    inside = live[:, None] & (column < dim)[None, :]
    lse_at = b * l_b + h * l_h + row * l_r
    part_at = b * p_b + h * p_h + row[:, None] * p_r + column[None, :] * p_d
    low = float("-inf")
    top = tl.load(lses[0] + lse_at, mask=live, other=low)
    for i in tl.static_range(1, parts):
        top = tl.maximum(top, tl.load(lses[i] + lse_at, mask=live, other=low))
    shift = tl.where(top == low, 0.0, top)
    total = tl.zeros([block], tl.float32)
    summed = tl.zeros([block, width], tl.float32)
    for i in tl.static_range(0, parts):
        lse = tl.load(lses[i] + lse_at, mask=live, other=low)
        weight = tl.exp(lse - shift)
        part = tl.load(outs[i] + part_at, mask=inside, other=0.0).to(tl.float32)
        part = tl.where((lse == low)[:, None], 0.0, part)
        total += weight
        summed += weight[:, None] * part
    divisor = tl.where(total == 0, 1.0, total)
    to = out + b * o_b + h * o_h + row[:, None] * o_r + column[None, :] * o_d
    tl.store(to, (summed / divisor[:, None]).to(out.dtype.element_ty), mask=inside)
    tl.store(lse_out + b * s_b + h * s_h + row * s_r, top + tl.log(divisor), mask=live)
