"""Makes, from dO and delta, an O with rowsum(dO * O) = delta, for kernels that ask for O backward.

O = dO delta / |dO|^2 serves as well as the true one (of which only delta is used), so O need not
travel. On CUDA with Triton it is one pass over dO; elsewhere plain torch.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton reads the annotations of its kernels.)
from __future__ import annotations

import torch
from torch import Tensor

from ultraattn.runtime.merge import NEG_INF
from ultraattn.runtime.tritons import has_triton, kernel, tl


@torch.no_grad()
def stand_in(dout: Tensor, delta: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """O for a backward kernel, and the LSE with +inf for rows that see nothing (their P is 0).

    Args:
        dout: (batch, heads, rows, dim), last stride 1.
        delta: (batch, heads, rows), float32.
        lse: (batch, heads, rows), float32; -inf for rows that see nothing.

    Returns:
        O in the dtype and strides of `dout`, zero in rows where `dout` is, and the LSE.
    """
    if dout.device.type == "cuda" and dout.numel() and has_triton():
        return _fused(dout, delta, lse)
    lse = lse.masked_fill(lse == NEG_INF, float("inf"))
    wide = dout.to(delta.dtype)
    top = wide.abs().amax(dim=-1, keepdim=True) if dout.shape[-1] else delta[..., None]
    direction = wide / top.masked_fill(top == 0, 1.0)
    length = (direction * direction).sum(dim=-1, keepdim=True)
    factor = delta[..., None] / (top * length).masked_fill(top == 0, 1.0)
    limit = torch.finfo(dout.dtype).max
    return (direction * factor).clamp(-limit, limit).to(dout.dtype), lse


@torch.no_grad()
def nonzero_rows(dout: Tensor, dlse: Tensor) -> Tensor:
    """`dout` with a tiny element in rows that are next to zero while `dlse` is not.

    A row with dO = 0 and a gradient of its LSE has a delta that no O can give. An element of
    2^-12 times that delta in dO changes no gradient by more than half a unit in the last place.
    """
    least = (dlse.abs() * 2.0**-12).clamp(max=torch.finfo(dout.dtype).max)
    least = torch.where(dlse == 0, 0.0, least.clamp(min=torch.finfo(dout.dtype).tiny))
    small = dout.abs().amax(dim=-1) < least
    first = torch.where(small, least.to(dout.dtype), dout[..., 0])
    return torch.cat([first[..., None], dout[..., 1:]], dim=-1)


def _fused(dout: Tensor, delta: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    batch, heads, rows, dim = dout.shape
    out = torch.empty_like(dout)
    lse_out = torch.empty(lse.shape, dtype=lse.dtype, device=lse.device)
    block = 16
    grid = (-(-rows // block), batch * heads)
    _stand_in_kernel[grid](
        dout, delta, lse, out, lse_out, heads, rows,
        *dout.stride()[:3], *delta.stride(), *lse.stride(), *out.stride()[:3],
        torch.finfo(dout.dtype).max, dim, 1 << (dim - 1).bit_length(), block,
    )  # fmt: skip
    return out, lse_out


@kernel
def _stand_in_kernel(
    dout, delta, lse, out, lse_out, heads, rows,
    do_b, do_h, do_r, d_b, d_h, d_r, l_b, l_h, l_r, o_b, o_h, o_r,
    limit, dim: tl.constexpr, width: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * block + tl.arange(0, block)
    both = tl.program_id(1)
    b, h = (both // heads).to(tl.int64), (both % heads).to(tl.int64)
    row64 = row.to(tl.int64)
    column = tl.arange(0, width)
    inside = (row < rows)[:, None] & (column < dim)[None, :]
    at = dout + b * do_b + h * do_h + row64[:, None] * do_r + column[None, :]
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(delta + b * d_b + h * d_h + row64 * d_r, mask=row < rows, other=0.0)
    some_lse = tl.load(lse + b * l_b + h * l_h + row64 * l_r, mask=row < rows, other=0.0)
    top = tl.max(tl.abs(x), 1)
    safe = tl.where(top == 0, 1.0, top)
    direction = x / safe[:, None]
    length = tl.sum(direction * direction, 1)
    factor = d / tl.where(top == 0, 1.0, safe * length)
    value = tl.minimum(tl.maximum(direction * factor[:, None], -limit), limit)
    to = out + b * o_b + h * o_h + row64[:, None] * o_r + column[None, :]
    tl.store(to, value.to(out.dtype.element_ty), mask=inside)
    dead = some_lse == float("-inf")
    some_lse = tl.where(dead, float("inf"), some_lse)
    tl.store(lse_out + both.to(tl.int64) * rows + row64, some_lse, mask=row < rows)
