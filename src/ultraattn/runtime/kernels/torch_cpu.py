"""Adapts PyTorch's CPU flash attention to pieces, guarding what it gets wrong or cannot take.

Traps of ``aten._scaled_dot_product_flash_attention_for_cpu`` (torch 2.13), and their guards:

* empty queries or keys kill the process: the operator is never called with any;
* a fully masked row comes back with LSE 0: its LSE is set to -inf;
* ``is_causal`` is aligned to the start: used only for bands that are so once trimmed;
* a last stride other than 1 gives wrong values silently: such tensors are copied;
* ``attn_mask`` must have the query's dtype: it is made in it, a few rows at a time;
* values of another head_dim than the keys' are refused, so they are refused here;
* in 16 bits the backward sums the heads of a group in 16 bits (dK, dV errors 5e-3 where 3e-3 do):
  keys are expanded there, and the group is summed in float32;
* the LSE is natural, but strided (batch, rows, heads): it is made contiguous.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ultraattn.masks.grid import BlockKind
from ultraattn.runtime.kernels import reference
from ultraattn.runtime.kernels.base import Piece
from ultraattn.runtime.kernels.blocks import Rectangle, rectangles, visible
from ultraattn.runtime.merge import NEG_INF, accumulate_dtype

name = "torch_cpu"

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
MASK_BYTES = 64 << 20
BAND_ROWS = 128


def refusal(q: Tensor, piece: Piece, deterministic: bool) -> str | None:
    """Why the operator cannot serve these, or None; it is deterministic always."""
    if q.device.type != "cpu":
        return f"it runs on the CPU and the query is on {q.device}"
    if q.dtype not in DTYPES:
        return f"dtype {q.dtype} is none of {', '.join(map(str, DTYPES))}"
    if piece.v.shape[-1] != q.shape[-1]:
        return f"it needs values of the keys' head_dim {q.shape[-1]}, not {piece.v.shape[-1]}"
    if q.shape[-1] == 0:
        return "it needs a head_dim of at least 1"
    return None


@torch.no_grad()
def forward(q: Tensor, piece: Piece, scale: float) -> tuple[Tensor, Tensor]:
    """O in the query's dtype and LSE in the accumulation dtype; see `Kernel.forward`."""
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    lse = q.new_full(q.shape[:3], NEG_INF, dtype=accumulate_dtype(q.dtype))
    piece = _even_groups(piece)
    for part in _rectangles(q, piece):
        rows, cols = slice(part.top, part.bottom), slice(part.left, part.right)
        tensors = [_unit(x) for x in (q[:, :, rows], piece.k[:, :, cols], piece.v[:, :, cols])]
        bias, causal, dead = _masking(q, piece, part)
        some_out, some_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *tensors, 0.0, causal, attn_mask=bias, scale=scale
        )
        if dead is not None:
            some_out = some_out.masked_fill(dead[..., None], 0.0)
            some_lse = some_lse.masked_fill(dead, NEG_INF)
        if part.rows == q.shape[2]:
            return some_out, some_lse.contiguous()
        out[:, :, rows], lse[:, :, rows] = some_out, some_lse
    return out, lse


@torch.no_grad()
def backward(
    dout: Tensor, q: Tensor, lse: Tensor, delta: Tensor, piece: Piece, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK, dV in the accumulation dtype or the query's; see `Kernel.backward`.

    The operator takes O where it needs delta = rowsum(dO * O) alone, so it is given an O that has
    this delta (`_stand_in`). Where none exists the reference computes the piece.
    """
    wide = accumulate_dtype(q.dtype)
    dead = lse == NEG_INF
    lse = lse.to(wide).masked_fill(dead, float("inf"))
    dout, delta = dout.to(q.dtype), delta.to(wide)
    if bool(dead.any()):
        dout, delta = dout.masked_fill(dead[..., None], 0.0), delta.masked_fill(dead, 0.0)
    out = _stand_in(dout, delta)
    if out is None:
        return reference.backward(dout, q, lse, delta, piece, scale)

    given, piece = piece, _even_groups(piece, expand=q.dtype.itemsize == 2)
    dq, dk, dv = (torch.zeros(x.shape, dtype=wide) for x in (q, piece.k, piece.v))
    for part in _rectangles(q, piece):
        rows, cols = slice(part.top, part.bottom), slice(part.left, part.right)
        bias, causal, _ = _masking(q, piece, part)
        tensors = [
            *(_unit(x[:, :, rows]) for x in (dout, q)),
            *(_unit(x[:, :, cols]) for x in (piece.k, piece.v)),
            *(x[:, :, rows].contiguous() for x in (out, lse)),
        ]
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *tensors, 0.0, causal, attn_mask=bias, scale=scale
        )
        if (part.rows, part.cols) == (q.shape[2], piece.cols):
            dq, dk, dv = grads
            break
        dq[:, :, rows] += grads[0]
        dk[:, :, cols] += grads[1]
        dv[:, :, cols] += grads[2]
    return dq, _ungroup(dk, given, piece), _ungroup(dv, given, piece)


def _unit(x: Tensor) -> Tensor:
    """`x`, copied unless its last stride is 1."""
    return x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)


def _rectangles(q: Tensor, piece: Piece) -> list[Rectangle]:
    """What one call each computes; the masks of a call stay below `MASK_BYTES`."""
    if q.numel() == 0:
        return []
    mask_heads = 1 if piece.mask is None else piece.mask.shape[0]
    most = MASK_BYTES // max(1, mask_heads * piece.cols * q.dtype.itemsize)
    return list(rectangles(piece, q.shape[2], min(BAND_ROWS, max(1, most)), most))


def _masking(q: Tensor, piece: Piece, part: Rectangle) -> tuple[Tensor | None, bool, Tensor | None]:
    """Bias (1, 1 or heads, rows, cols), is_causal, and which rows (1, 1 or heads, rows) are dead.

    Rows of a trimmed band all see a key, so only masks have dead rows.
    """
    if piece.kind is not BlockKind.PARTIAL and part.causal and not part.full:
        return None, True, None
    seen = visible(piece, part)
    if seen is None:
        return None, False, None
    bias = torch.zeros(seen.shape, dtype=q.dtype).masked_fill_(~seen, NEG_INF)[None]
    return bias, False, ~seen.any(dim=-1)[None] if piece.kind is BlockKind.PARTIAL else None


def _even_groups(piece: Piece, expand: bool = False) -> Piece:
    """The piece with key heads that all serve as many query heads, in order, as the operator asks.

    A slice where the map allows it, else (or if `expand` is set) one key head for each query head.
    """
    index = piece.kv_of_head
    if not index:
        return piece
    first = min(index)
    used = max(index) - first + 1
    even = tuple(first + h * used // len(index) for h in range(len(index)))
    if index == even and len(index) % used == 0 and (not expand or used == len(index)):
        if used == piece.k.shape[1]:
            return piece
        some = slice(first, first + used)
        k, v = piece.k[:, some], piece.v[:, some]
    else:
        k, v, used = piece.k[:, list(index)], piece.v[:, list(index)], len(index)
    even = tuple(h * used // len(index) for h in range(len(index)))
    return replace(piece, k=k, v=v, kv_of_head=even)


def _ungroup(grad: Tensor, given: Piece, used: Piece) -> Tensor:
    """Gradients of the key heads of `used`, added up to those of the `given` piece."""
    if used is given:
        return grad
    grad = grad.to(accumulate_dtype(grad.dtype))
    origin = dict(zip(used.kv_of_head, given.kv_of_head, strict=True))
    index = torch.tensor([origin[head] for head in range(grad.shape[1])])
    batch, _, cols, dim = grad.shape
    return grad.new_zeros((batch, given.k.shape[1], cols, dim)).index_add_(1, index, grad)


def _stand_in(dout: Tensor, delta: Tensor) -> Tensor | None:
    """An O with rowsum(dO * O) = delta, in the dtype of `dout`; None where there is none.

    O = u delta / (t |u|^2) with t the row's largest |dO| and u = dO / t, so that nothing under- or
    overflows. A row with dO = 0 has one only if its delta is 0.
    """
    wide = delta.dtype
    if dout.numel() == 0:
        return dout
    top = dout.abs().amax(dim=-1).to(wide)
    zero = top == 0
    if bool((zero & (delta != 0)).any()):
        return None
    top = top.masked_fill(zero, 1.0)[..., None]
    unit = dout.to(wide) / top
    length = (unit * unit).sum(dim=-1, keepdim=True).masked_fill(zero[..., None], 1.0)
    out = (unit * (delta[..., None] / top / length)).to(dout.dtype)
    return out if bool(torch.isfinite(out).all()) or not bool(torch.isfinite(delta).all()) else None
