"""Attention over any piece in Triton: PARTIAL blocks with their masks, any band, float32 too.

One launch forward and two backward (one for dQ, one for dK and dV), with the global LSE and delta
taken as they are. Every sum is made in one program in a fixed order, so it is deterministic; the
heads of a group are summed in float32. Tiles that hold no visible pair cost the look at their mask.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton reads the annotations of its kernels.)
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ultraattn.masks.grid import BlockKind
from ultraattn.runtime.kernels.base import Piece
from ultraattn.runtime.kernels.fused import even_groups, ungroup
from ultraattn.runtime.merge import NEG_INF
from ultraattn.runtime.tritons import has_triton, kernel, tl

name = "masked"

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FAR = 2**30
"""A band's limit beyond every chunk, in 32 bits."""


def refusal(q: Tensor, piece: Piece, deterministic: bool) -> str | None:
    """Why the kernels cannot serve these, or None; they are deterministic always."""
    if q.device.type != "cuda":
        return f"it runs on CUDA and the query is on {q.device}"
    if not has_triton():
        return "it needs Triton, which is not installed"
    if q.dtype not in DTYPES:
        return f"dtype {q.dtype} is none of {', '.join(map(str, DTYPES))}"
    for width in (q.shape[-1], piece.v.shape[-1]):
        if not 1 <= width <= 256:
            return f"head_dim {width} is not from 1 to 256"
    return None


@torch.no_grad()
def forward(q: Tensor, piece: Piece, scale: float) -> tuple[Tensor, Tensor]:
    """O in the query's dtype and LSE in float32; see `Kernel.forward`."""
    piece = even_groups(piece)
    batch, heads, rows, dim = q.shape
    dim_v = piece.v.shape[-1]
    lse = q.new_full((batch, heads, rows), NEG_INF, dtype=torch.float32)
    out = q.new_zeros((batch, rows, heads, dim_v)).transpose(1, 2)
    if _nothing(q, piece):
        return out, lse
    q, k, v = (_unit(x) for x in (q, piece.k, piece.v))
    mask, strides, lo, hi = _visible(piece)
    sizes = _sizes(q, dim, dim_v)
    _forward_kernel[(-(-rows // sizes["tile_m"]), batch * heads)](
        q, k, v, mask, out, lse, heads, heads // k.shape[1], rows, piece.cols, scale, lo, hi,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *strides, *out.stride()[:3],
        **sizes,
    )  # fmt: skip
    return out, lse


@torch.no_grad()
def backward(
    dout: Tensor, q: Tensor, lse: Tensor, delta: Tensor, piece: Piece, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK, dV in float32; see `Kernel.backward`."""
    given, piece = piece, even_groups(piece)
    batch, heads, rows, dim = q.shape
    cols, dim_v = piece.cols, piece.v.shape[-1]
    dq, dk, dv = (
        torch.zeros(x.shape, dtype=torch.float32, device=q.device) for x in (q, piece.k, piece.v)
    )
    if not _nothing(q, piece):
        q, k, v, dout = (_unit(x) for x in (q, piece.k, piece.v, dout.to(q.dtype)))
        lse, delta = lse.float().contiguous(), delta.float().contiguous()
        mask, strides, lo, hi = _visible(piece)
        group = heads // k.shape[1]
        sizes = _sizes(q, dim, dim_v)
        common = (
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *strides, *dout.stride()[:3],
        )  # fmt: skip
        _dq_kernel[(-(-rows // sizes["tile_m"]), batch * heads)](
            q, k, v, mask, dout, lse, delta, dq, heads, group, rows, cols, scale, lo, hi,
            *common, **sizes,
        )  # fmt: skip
        _dkv_kernel[(-(-cols // sizes["tile_n"]), batch * k.shape[1])](
            q, k, v, mask, dout, lse, delta, dk, dv, heads, group, rows, cols, scale, lo, hi,
            *common, **sizes,
        )  # fmt: skip
    return dq, ungroup(dk, given, piece), ungroup(dv, given, piece)


def _nothing(q: Tensor, piece: Piece) -> bool:
    return q.numel() == 0 or piece.cols == 0 or piece.kind is BlockKind.EMPTY


def _unit(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)


def _visible(piece: Piece) -> tuple[Tensor | None, tuple[int, int, int], int, int]:
    """The mask as bytes, its strides by head, row and column, and the band."""
    if piece.kind is BlockKind.PARTIAL and piece.mask is not None:
        mask = piece.mask.to(piece.k.device).view(torch.int8)
        by_head = mask.stride(0) if mask.shape[0] > 1 else 0
        return mask, (by_head, mask.stride(1), mask.stride(2)), -FAR, FAR
    if piece.kind is BlockKind.FULL:
        return None, (0, 0, 0), -FAR, FAR
    return None, (0, 0, 0), max(-FAR, min(FAR, piece.lo)), max(-FAR, min(FAR, piece.hi))


def _sizes(q: Tensor, dim: int, dim_v: int) -> dict[str, Any]:
    widths = [max(16, 1 << (width - 1).bit_length()) for width in (dim, dim_v)]
    small = q.dtype == torch.float32 or max(widths) > 128
    return {
        "dim": dim,
        "dim_v": dim_v,
        "width": widths[0],
        "width_v": widths[1],
        "tile_m": 32 if small else 64,
        "tile_n": 32 if small else 64,
        "precision": "ieee" if q.dtype == torch.float32 else "tf32",
        "num_warps": 4,
        "num_stages": 2,
    }


@kernel
def _seen(mask, h, mask_h, mask_r, mask_c, row, column, rows, cols, lo, hi):
    """Which pairs of a tile are visible."""
    seen = (row < rows)[:, None] & (column < cols)[None, :]
    distance = row[:, None] - column[None, :]
    seen = seen & (distance >= lo) & (distance <= hi)
    if mask is not None:
        at = mask + h * mask_h + row.to(tl.int64)[:, None] * mask_r + column[None, :] * mask_c
        seen = seen & (tl.load(at, mask=seen, other=0) != 0)
    return seen


@kernel
def _tile(pointer, line, stride, width_on, inside, dim):
    """Rows `line` of a matrix as a tile, zero outside."""
    at = pointer + line.to(tl.int64)[:, None] * stride + width_on[None, :]
    return tl.load(at, mask=inside[:, None] & (width_on < dim)[None, :], other=0.0)


@kernel
def _forward_kernel(
    q, k, v, mask, out, lse, heads, group, rows, cols, scale, lo, hi,
    q_b, q_h, q_r, k_b, k_h, k_r, v_b, v_h, v_r, mask_h, mask_r, mask_c, o_b, o_h, o_r,
    dim: tl.constexpr, dim_v: tl.constexpr, width: tl.constexpr, width_v: tl.constexpr,
    tile_m: tl.constexpr, tile_n: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    low = float("-inf")
    top_row = tl.program_id(0) * tile_m
    both = tl.program_id(1)
    b, h = (both // heads).to(tl.int64), (both % heads).to(tl.int64)
    row = top_row + tl.arange(0, tile_m)
    on, on_v = tl.arange(0, width), tl.arange(0, width_v)
    queries = _tile(q + b * q_b + h * q_h, row, q_r, on, row < rows, dim)
    keys, values = k + b * k_b + (h // group) * k_h, v + b * v_b + (h // group) * v_h
    factor = scale * 1.4426950408889634
    highest = tl.full([tile_m], low, tl.float32)
    total = tl.zeros([tile_m], tl.float32)
    acc = tl.zeros([tile_m, width_v], tl.float32)
    first = tl.maximum(0, (top_row - hi) // tile_n * tile_n)
    last = tl.minimum(cols, top_row + tile_m - lo)
    for start in range(first, last, tile_n):
        column = start + tl.arange(0, tile_n)
        seen = _seen(mask, h, mask_h, mask_r, mask_c, row, column, rows, cols, lo, hi)
        if tl.max(tl.max(seen.to(tl.int32), 1), 0) > 0:
            some_k = _tile(keys, column, k_r, on, column < cols, dim)
            some_v = _tile(values, column, v_r, on_v, column < cols, dim_v)
            scores = tl.dot(queries, tl.trans(some_k), input_precision=precision) * factor
            scores = tl.where(seen, scores, low)
            higher = tl.maximum(highest, tl.max(scores, 1))
            shift = tl.where(higher == low, 0.0, higher)
            weights = tl.exp2(scores - shift[:, None])
            fade = tl.exp2(highest - shift)
            total = total * fade + tl.sum(weights, 1)
            acc = acc * fade[:, None]
            acc += tl.dot(weights.to(some_v.dtype), some_v, input_precision=precision)
            highest = higher
    divisor = tl.where(total == 0, 1.0, total)
    at = out + b * o_b + h * o_h + row.to(tl.int64)[:, None] * o_r + on_v[None, :]
    inside = (row < rows)[:, None] & (on_v < dim_v)[None, :]
    tl.store(at, (acc / divisor[:, None]).to(out.dtype.element_ty), mask=inside)
    natural = (highest + tl.log2(divisor)) * 0.6931471805599453
    tl.store(lse + both.to(tl.int64) * rows + row, natural, mask=row < rows)


@kernel
def _dq_kernel(
    q, k, v, mask, dout, lse, delta, dq, heads, group, rows, cols, scale, lo, hi,
    q_b, q_h, q_r, k_b, k_h, k_r, v_b, v_h, v_r, mask_h, mask_r, mask_c, o_b, o_h, o_r,
    dim: tl.constexpr, dim_v: tl.constexpr, width: tl.constexpr, width_v: tl.constexpr,
    tile_m: tl.constexpr, tile_n: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    low = float("-inf")
    top_row = tl.program_id(0) * tile_m
    both = tl.program_id(1)
    b, h = (both // heads).to(tl.int64), (both % heads).to(tl.int64)
    row = top_row + tl.arange(0, tile_m)
    on, on_v = tl.arange(0, width), tl.arange(0, width_v)
    queries = _tile(q + b * q_b + h * q_h, row, q_r, on, row < rows, dim)
    grads = _tile(dout + b * o_b + h * o_h, row, o_r, on_v, row < rows, dim_v)
    keys, values = k + b * k_b + (h // group) * k_h, v + b * v_b + (h // group) * v_h
    at = both.to(tl.int64) * rows + row
    shift = tl.load(lse + at, mask=row < rows, other=low)
    centre = tl.load(delta + at, mask=row < rows, other=0.0)
    dead = shift == low
    shift = tl.where(dead, 0.0, shift) * 1.4426950408889634
    centre = tl.where(dead, 0.0, centre)
    factor = scale * 1.4426950408889634
    acc = tl.zeros([tile_m, width], tl.float32)
    first = tl.maximum(0, (top_row - hi) // tile_n * tile_n)
    last = tl.minimum(cols, top_row + tile_m - lo)
    for start in range(first, last, tile_n):
        column = start + tl.arange(0, tile_n)
        seen = _seen(mask, h, mask_h, mask_r, mask_c, row, column, rows, cols, lo, hi)
        if tl.max(tl.max(seen.to(tl.int32), 1), 0) > 0:
            some_k = _tile(keys, column, k_r, on, column < cols, dim)
            some_v = _tile(values, column, v_r, on_v, column < cols, dim_v)
            scores = tl.dot(queries, tl.trans(some_k), input_precision=precision) * factor
            live = seen & (dead == 0)[:, None]
            weights = tl.where(live, tl.exp2(scores - shift[:, None]), 0.0)
            slopes = tl.dot(grads, tl.trans(some_v), input_precision=precision) - centre[:, None]
            slopes = (weights * slopes).to(some_k.dtype)
            acc += tl.dot(slopes, some_k, input_precision=precision)
    to = dq + at[:, None] * dim + on[None, :]
    tl.store(to, acc * scale, mask=(row < rows)[:, None] & (on < dim)[None, :])


@kernel
def _dkv_kernel(
    q, k, v, mask, dout, lse, delta, dk, dv, heads, group, rows, cols, scale, lo, hi,
    q_b, q_h, q_r, k_b, k_h, k_r, v_b, v_h, v_r, mask_h, mask_r, mask_c, o_b, o_h, o_r,
    dim: tl.constexpr, dim_v: tl.constexpr, width: tl.constexpr, width_v: tl.constexpr,
    tile_m: tl.constexpr, tile_n: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    low = float("-inf")
    left = tl.program_id(0) * tile_n
    both = tl.program_id(1)
    kv_heads = heads // group
    b, g = (both // kv_heads).to(tl.int64), (both % kv_heads).to(tl.int64)
    column = left + tl.arange(0, tile_n)
    on, on_v = tl.arange(0, width), tl.arange(0, width_v)
    some_k = _tile(k + b * k_b + g * k_h, column, k_r, on, column < cols, dim)
    some_v = _tile(v + b * v_b + g * v_h, column, v_r, on_v, column < cols, dim_v)
    factor = scale * 1.4426950408889634
    acc_k = tl.zeros([tile_n, width], tl.float32)
    acc_v = tl.zeros([tile_n, width_v], tl.float32)
    first = tl.maximum(0, (left + lo) // tile_m * tile_m)
    last = tl.minimum(rows, left + tile_n + hi)
    for member in range(group):
        h = g * group + member
        line = (b * heads + h) * rows
        for start in range(first, last, tile_m):
            row = start + tl.arange(0, tile_m)
            seen = _seen(mask, h, mask_h, mask_r, mask_c, row, column, rows, cols, lo, hi)
            if tl.max(tl.max(seen.to(tl.int32), 1), 0) > 0:
                queries = _tile(q + b * q_b + h * q_h, row, q_r, on, row < rows, dim)
                grads = _tile(dout + b * o_b + h * o_h, row, o_r, on_v, row < rows, dim_v)
                shift = tl.load(lse + line + row, mask=row < rows, other=low)
                centre = tl.load(delta + line + row, mask=row < rows, other=0.0)
                dead = shift == low
                shift = tl.where(dead, 0.0, shift) * 1.4426950408889634
                centre = tl.where(dead, 0.0, centre)
                scores = tl.dot(queries, tl.trans(some_k), input_precision=precision) * factor
                live = seen & (dead == 0)[:, None]
                weights = tl.where(live, tl.exp2(scores - shift[:, None]), 0.0)
                acc_v += tl.dot(tl.trans(weights.to(grads.dtype)), grads, input_precision=precision)
                slopes = tl.dot(grads, tl.trans(some_v), input_precision=precision)
                slopes = (weights * (slopes - centre[:, None])).to(queries.dtype)
                acc_k += tl.dot(tl.trans(slopes), queries, input_precision=precision)
    at = (both.to(tl.int64) * cols + column)[:, None]
    inside = (column < cols)[:, None]
    tl.store(dk + at * dim + on[None, :], acc_k * scale, mask=inside & (on < dim)[None, :])
    tl.store(dv + at * dim_v + on_v[None, :], acc_v, mask=inside & (on_v < dim_v)[None, :])
