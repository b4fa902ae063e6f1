"""Attention over any piece in plain torch: every dtype, size, stride, band and mask, any device.

Everything is computed in the accumulation dtype, some rows and heads at a time so that scores
stay below `SCORE_BYTES`. Slow and easy to read; the fast kernels are judged by it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ultraattn.runtime.kernels.base import Piece
from ultraattn.runtime.kernels.blocks import Rectangle, rectangles, visible
from ultraattn.runtime.kernels.fused import index_on
from ultraattn.runtime.merge import NEG_INF, accumulate_dtype

name = "reference"

SCORE_BYTES = 64 << 20


def refusal(q: Tensor, piece: Piece, deterministic: bool) -> str | None:
    """Nothing is refused but dtypes that are not floating point."""
    if not q.dtype.is_floating_point:
        return f"{q.dtype} is not a floating dtype"
    return None


@torch.no_grad()
def forward(q: Tensor, piece: Piece, scale: float) -> tuple[Tensor, Tensor]:
    """O and LSE of `q` over the piece, both in the accumulation dtype; see `Kernel.forward`."""
    wide = accumulate_dtype(q.dtype)
    out = q.new_zeros((*q.shape[:3], piece.v.shape[-1]), dtype=wide)
    lse = q.new_full(q.shape[:3], NEG_INF, dtype=wide)
    for heads, kv_heads, part in _portions(q, piece):
        rows, cols = slice(part.top, part.bottom), slice(part.left, part.right)
        v = piece.v[:, kv_heads, cols].to(wide)
        scores = _scores(q, piece, scale, heads, kv_heads, part)
        top = scores.amax(dim=-1, keepdim=True)
        weights = scores.sub_(top.masked_fill(top == NEG_INF, 0.0)).exp_()
        total = weights.sum(dim=-1, keepdim=True)
        out[:, heads, rows] = (weights @ v) / total.masked_fill(total == 0, 1.0)
        lse[:, heads, rows] = (top + total.log()).squeeze(-1)
    return out, lse


@torch.no_grad()
def backward(
    dout: Tensor, q: Tensor, lse: Tensor, delta: Tensor, piece: Piece, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK, dV in the accumulation dtype; see `Kernel.backward`.

    With P = exp(scale Q K^T - LSE): dV = P^T dO, dS = P * (dO V^T - delta), dQ = scale dS K and
    dK = scale dS^T Q (FlashAttention, Dao et al. 2022, algorithm 4).
    """
    wide = accumulate_dtype(q.dtype)
    dq, dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q, piece.k, piece.v))
    dead = lse == NEG_INF
    for heads, kv_heads, part in _portions(q, piece):
        rows, cols = slice(part.top, part.bottom), slice(part.left, part.right)
        unseen = dead[:, heads, rows, None]
        k, v = (x[:, kv_heads, cols].to(wide) for x in (piece.k, piece.v))
        do = dout[:, heads, rows].to(wide).masked_fill(unseen, 0.0)
        shift = lse[:, heads, rows, None].to(wide).masked_fill(unseen, float("inf"))
        centre = delta[:, heads, rows, None].to(wide).masked_fill(unseen, 0.0)
        weights = _scores(q, piece, scale, heads, kv_heads, part).sub_(shift).exp_()
        index = index_on(tuple(kv_heads), dv.device)
        dv[:, :, cols].index_add_(1, index, weights.mT @ do)
        dscores = weights.mul_((do @ v.mT).sub_(centre)).mul_(scale)
        dq[:, heads, rows] += dscores @ k
        dk[:, :, cols].index_add_(1, index, dscores.mT @ q[:, heads, rows].to(wide))
    return dq, dk, dv


def _portions(q: Tensor, piece: Piece) -> Iterator[tuple[slice, list[int], Rectangle]]:
    """Query heads, their key heads and a rectangle, so that their scores fit in `SCORE_BYTES`."""
    batch, heads, rows, _ = q.shape
    if batch == 0 or heads == 0:
        return
    bytes_per_row = batch * piece.cols * accumulate_dtype(q.dtype).itemsize
    head_step = max(1, min(heads, SCORE_BYTES // max(1, bytes_per_row)))
    row_step = max(1, SCORE_BYTES // max(1, bytes_per_row * head_step))
    for first in range(0, heads, head_step):
        some = slice(first, min(heads, first + head_step))
        for whole in rectangles(piece, rows, row_step, row_step):
            for top in range(0, whole.rows, row_step):
                part = whole.take(top, min(whole.rows, top + row_step)).trim()
                yield some, list(piece.kv_of_head[some]), part


def _scores(
    q: Tensor, piece: Piece, scale: float, heads: slice, kv_heads: list[int], part: Rectangle
) -> Tensor:
    """scale Q K^T of a portion, -inf where not visible: (batch, heads, part.rows, part.cols)."""
    wide = accumulate_dtype(q.dtype)
    some_q = q[:, heads, part.top : part.bottom].to(wide)
    some_k = piece.k[:, kv_heads, part.left : part.right].to(wide)
    scores = (some_q @ some_k.mT).mul_(scale)
    seen = visible(piece, part, heads)
    return scores if seen is None else scores.masked_fill_(~seen, NEG_INF)
