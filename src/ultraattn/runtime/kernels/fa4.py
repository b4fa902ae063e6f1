"""Adapts FlashAttention-4 (the extra `ultraattn[fa4]`) to pieces: full, causal, any band.

Its window counts from the end-aligned diagonal, as FlashAttention-2's does, so bands are told to it
alike (`ultraattn.runtime.kernels.flash2.window`). Its LSE is natural, (batch, heads, rows). Its
backward pass asks for O, where `standin` makes one. It compiles a kernel for each head_dim, number
of query heads to a key head and form of band, some ten seconds each, at the first call that needs
it; `FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1` keeps them on disk. Its compiler does not bear two
threads (it ends the process), so calls take turns.

"auto" takes it for bands that cuDNN does not take, where whole blocks are large enough for it to be
faster than one launch for a set of blocks (`ultraattn.runtime.kernels.rates`); full and causal
blocks are cuDNN's there, which starts without compiling.

Its backward pass is no public function, and other releases of the packages below it can make it
hang (a bulk copy is issued by one thread of a warp or by all, and either side of the two packages
may choose which). So only those releases are accepted that were compared with dense attention here
(`tests/gpu/test_kernels.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import lru_cache
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from ultraattn.runtime.kernels import fused
from ultraattn.runtime.kernels.base import Piece
from ultraattn.runtime.kernels.blocks import Rectangle
from ultraattn.runtime.kernels.flash2 import window

name = "fa4"

VERSIONS = {
    "flash-attn-4": "4.0.0b36",
    "quack-kernels": "0.6.4",
    "nvidia-cutlass-dsl": "4.6.2",
}
"""The extra pins them too."""
HEAD_DIMS = (64, 96, 128)
"""Those that were compared with dense attention."""
INSTALL = "pip install 'ultraattn[fa4]'"

_turn = threading.Lock()


@lru_cache(maxsize=1)
def missing() -> str | None:
    """Why the packages cannot be used and how to install them, or None."""
    for package, version in VERSIONS.items():
        found = _installed(package)
        if found is None:
            return f"it needs {package} {version}, which is not installed: {INSTALL}"
        if found != version:
            return f"it needs {package} {version}, and {found} is installed: {INSTALL}"
    return None


def refusal(q: Tensor, piece: Piece, deterministic: bool) -> str | None:
    """Why the operator cannot serve these, or None."""
    reason = missing() or fused.common_refusal(q, piece, 8, max(HEAD_DIMS))
    reason = reason or refusal_of(q.device, q.dtype, q.shape[-1], piece.v.shape[-1])
    if reason is None and deterministic:
        return "its backward adds in no fixed order"
    return reason


def refusal_of(device: torch.device, dtype: torch.dtype, dim: int, dim_v: int) -> str | None:
    """Why the operator cannot serve any piece of such tensors, or None."""
    if missing() is not None:
        return missing()
    if device.type != "cuda":
        return f"it runs on CUDA, not on {device}"
    if dtype not in fused.DTYPES:
        return f"dtype {dtype} is none of {', '.join(map(str, fused.DTYPES))}"
    if dim not in HEAD_DIMS:
        return f"head_dim {dim} is none of {', '.join(map(str, HEAD_DIMS))}"
    if dim_v != dim:
        return f"it needs values of the keys' head_dim {dim}, not {dim_v}"
    if torch.cuda.get_device_capability(device)[0] != 9:
        return "it was compared with dense attention on compute capability 9.0 alone"
    return None


def forward(q: Tensor, piece: Piece, scale: float) -> tuple[Tensor, Tensor]:
    """O in the query's dtype and LSE in float32; see `Kernel.forward`."""
    return fused.forward(OPERATOR, q, piece, scale)


def backward(
    dout: Tensor, q: Tensor, lse: Tensor, delta: Tensor, piece: Piece, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK, dV in the query's dtype or wider; see `Kernel.backward`."""
    return fused.backward(OPERATOR, dout, q, lse, delta, piece, scale)


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@lru_cache(maxsize=1)
def _interface() -> Any:
    from flash_attn.cute import interface

    return interface


def _band(part: Rectangle) -> dict[str, Any]:
    """How the package is told of a rectangle's band: None is without limit."""
    causal, left, right = window(part)
    if causal or (left, right) == (-1, -1):
        return {"causal": causal}
    limits = {"window_size_left": left, "window_size_right": right}
    return {name: None if limit < 0 else limit for name, limit in limits.items()}


def _forward(
    q: Tensor, k: Tensor, v: Tensor, part: Rectangle, scale: float
) -> tuple[Tensor, Tensor]:
    with _turn:
        out, lse, *_ = _interface()._flash_attn_fwd(
            *(x.transpose(1, 2) for x in (q, k, v)), softmax_scale=scale, return_lse=True,
            **_band(part),
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
    with _turn:
        grads = _interface()._flash_attn_bwd(
            *(x.transpose(1, 2) for x in (q, k, v, out, dout)), lse, softmax_scale=scale,
            **_band(part),
        )  # fmt: skip
    return [grad.transpose(1, 2) for grad in grads[:3]]


OPERATOR = fused.Operator(_forward, _backward, bands=True)
