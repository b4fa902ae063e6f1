"""Adapts FlashAttention-2, through PyTorch's operators, to pieces: full, causal, any band.

Its window counts from the end-aligned diagonal: over R queries and C keys, query i sees keys
i + C - R - left to i + C - R + right, so the band lo <= i - j <= hi is left = hi + C - R and
right = -lo - (C - R), neither negative once the rectangle is trimmed. Backward, grouped heads are
summed in 16 bits inside the operator, as on one device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ultraattn.masks.grid import OPEN_HI, OPEN_LO
from ultraattn.runtime.kernels import fused
from ultraattn.runtime.kernels.base import Piece
from ultraattn.runtime.kernels.blocks import Rectangle

name = "flash2"


def refusal(q: Tensor, piece: Piece, deterministic: bool) -> str | None:
    """Why the operator cannot serve these, or None."""
    reason = fused.common_refusal(q, piece, 8, 256)
    if reason is not None:
        return reason
    if piece.v.shape[-1] != q.shape[-1]:
        return f"it needs values of the keys' head_dim {q.shape[-1]}, not {piece.v.shape[-1]}"
    if torch.cuda.get_device_capability(q.device) < (8, 0):
        return "it needs compute capability 8.0 or later"
    if deterministic and not torch.are_deterministic_algorithms_enabled():
        return "its backward adds in no fixed order unless torch.use_deterministic_algorithms(True)"
    return None


def forward(q: Tensor, piece: Piece, scale: float) -> tuple[Tensor, Tensor]:
    """O in the query's dtype and LSE in float32; see `Kernel.forward`."""
    return fused.forward(OPERATOR, q, piece, scale)


def backward(
    dout: Tensor, q: Tensor, lse: Tensor, delta: Tensor, piece: Piece, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK, dV in the query's dtype or wider; see `Kernel.backward`."""
    return fused.backward(OPERATOR, dout, q, lse, delta, piece, scale)


def window(part: Rectangle) -> tuple[bool, int, int]:
    """(is_causal, left, right) of a trimmed rectangle; -1 is without limit.

    >>> window(Rectangle(0, 4, 0, 6, lo=-2))
    (True, -1, 0)
    >>> window(Rectangle(0, 4, 0, 4, lo=0, hi=1))
    (False, 1, 0)
    """
    if part.full:
        return False, -1, -1
    ahead = part.cols - part.rows
    left = -1 if part.hi >= OPEN_HI or part.hi >= part.rows - 1 else part.hi + ahead
    right = -1 if part.lo <= OPEN_LO or part.lo <= 1 - part.cols else -part.lo - ahead
    return (True, -1, 0) if (left, right) == (-1, 0) else (False, left, right)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, part: Rectangle, scale: float
) -> tuple[Tensor, Tensor]:
    causal, left, right = window(part)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *(x.transpose(1, 2) for x in (q, k, v)), None, None, part.rows, part.cols, 0.0, causal,
        False, scale=scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return out.transpose(1, 2), lse


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    part: Rectangle,
    scale: float,
) -> Sequence[Tensor]:
    causal, left, right = window(part)
    unused = fused.index_on((0, 0), q.device)
    grads = torch.ops.aten._flash_attention_backward(
        *(x.transpose(1, 2) for x in (dout, q, k, v, out)), lse, None, None, part.rows, part.cols,
        0.0, causal, unused, unused, scale=scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return [grad.transpose(1, 2) for grad in grads]


OPERATOR = fused.Operator(_forward, _backward, bands=True)
