"""Adapts cuDNN attention, through PyTorch's operators, to pieces: full and causal blocks.

It is the fastest of PyTorch's own on Hopper (600 / 525 TFLOP/s forward / backward on an H200).
Its LSE is natural, (batch, heads, rows, 1); its causal mask is aligned to the start; grouped heads
and values of another head_dim are its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ultraattn.runtime.kernels import fused
from ultraattn.runtime.kernels.base import Piece
from ultraattn.runtime.kernels.blocks import Rectangle

name = "cudnn"


def refusal(q: Tensor, piece: Piece, deterministic: bool) -> str | None:
    """Why the operator cannot serve these, or None."""
    reason = fused.common_refusal(q, piece, 8, 128)
    if reason is not None:
        return reason
    if not fused.is_startable(piece, q.shape[2]):
        return f"its bands are causal, and this one is {piece.lo} <= i - j <= {piece.hi}"
    available = torch.backends.cudnn.is_available()  # type: ignore[no-untyped-call]
    if torch.cuda.get_device_capability(q.device) < (8, 0) or not available:
        return "it needs cuDNN and compute capability 8.0 or later"
    if deterministic:
        return "its backward adds in no fixed order"
    return None


def forward(q: Tensor, piece: Piece, scale: float) -> tuple[Tensor, Tensor]:
    """O in the query's dtype and LSE in float32; see `Kernel.forward`."""
    return fused.forward(OPERATOR, q, piece, scale)


def backward(
    dout: Tensor, q: Tensor, lse: Tensor, delta: Tensor, piece: Piece, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK, dV in the query's dtype or wider; see `Kernel.backward`."""
    return fused.backward(OPERATOR, dout, q, lse, delta, piece, scale)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, part: Rectangle, scale: float
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, not part.full, False, scale=scale
    )
    return out, lse.reshape(q.shape[:3])


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
    unused = fused.index_on((0,), q.device)[0]
    grads: Sequence[Tensor] = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, out, lse[..., None], unused, unused, None, None, None,
        part.rows, part.cols, 0.0, not part.full, scale=scale,
    )  # fmt: skip
    return grads


OPERATOR = fused.Operator(_forward, _backward, bands=False)
