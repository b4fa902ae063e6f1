"""Judges results against dense attention: the rule of correctness, as numbers and limits.

The error of a result is the Frobenius norm of its difference from the float64 dense result, over
the norm of that; out, dQ, dK and dV are judged each on their own. Float64 inputs: at most 1e-10.
Otherwise at most twice the error of one device in the same dtype, plus 4 units in the last place.
The largest single error (over the largest element) stays under 6 times that of one device, plus
the same 4 units.

Where the dense result is zero there is nothing to divide by. A gradient dS = P * (dP - delta) of a
row that sees one key is zero because two numbers cancel, and is then as exact as these are: dQ and
dK are held against a bound of their size. Otherwise errors are absolute.

    results = Results(out, dq, dk, dv)                         # any dtype, whole sequence
    truth   = dense_results(q, k, v, dout, visible)            # float64, by the formulas
    device  = device_results(q, k, v, dout, visible)           # one device, the dtype of q
    errors  = compare(results, truth)
    limits  = limit(q.dtype, compare(device, truth))
    assert not above(errors, limits)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ultraattn.runtime.dense import Visible, dense_attention, dense_backward

NAMES = ("out", "dq", "dk", "dv")

FLOAT64_LIMIT = 1e-10
DEVICE_FACTOR = 2.0
SINGLE_FACTOR = 6.0
LAST_PLACES = 4
"""Units in the last place that any result may be off."""


@dataclass(frozen=True, eq=False)
class Results:
    """One attention and its gradients, over the whole sequence; LSE where it is known.

    out: (batch, heads, queries, value_dim); dq: (batch, heads, queries, head_dim); dk, dv:
    (batch, kv_heads, keys, head_dim or value_dim); lse: (batch, heads, queries).
    """

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    lse: Tensor | None = None
    terms: dict[str, float] = field(default_factory=dict)
    """For the truth: bounds of the norms of what cancels in dQ and dK."""

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of what is judged."""
        for name in NAMES:
            yield name, getattr(self, name)


@dataclass(frozen=True)
class Errors:
    """Errors, or the limits of errors, of out, dq, dk, dv."""

    norm: dict[str, float]
    """Frobenius norm of the difference over that of the dense result."""
    single: dict[str, float]
    """Largest absolute difference over the largest absolute element of the dense result."""


def dense_results(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    visible: Visible = None,
    scale: float | None = None,
) -> Results:
    """The truth, in float64: see `ultraattn.runtime.dense` for shapes and formulas."""
    out, lse = dense_attention(q, k, v, visible, scale)
    # |dP_ij| <= |dO_i| |V_j|, and rows of P add up to 1.
    factor = q.shape[-1] ** -0.5 if scale is None else abs(scale)
    most = factor * float(dout.double().norm()) * _longest(v)
    terms = {"dq": most * _longest(k), "dk": most * _longest(q)}
    dq, dk, dv = dense_backward(dout, q, k, v, visible, scale)
    return Results(out, dq, dk, dv, lse, terms)


def device_results(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    visible: Tensor | None = None,
    scale: float | None = None,
) -> Results:
    """What one device makes of it in the dtype of `q`: torch's attention and autograd.

    `visible` is bool, (queries, keys) or (1 or heads, queries, keys), or None. Queries that see
    nothing give zeros.
    """
    if not min(q.shape) or not min(k.shape):
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        return Results(torch.zeros_like(dout), dq, dk, dv)
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    bias = blind = None
    if visible is not None:
        # A query that sees nothing is let see everything, and its output and gradient are zeroed.
        blind = ~visible.any(dim=-1, keepdim=True)
        bias = visible | blind
        bias = bias if bias.ndim == 2 else bias[None]
    with torch.enable_grad():
        out = scaled_dot_product_attention(q, k, v, bias, scale=scale, enable_gqa=True)
        if blind is not None:
            out = out.masked_fill(blind, 0.0)
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    return Results(out.detach(), dq, dk, dv)


def compare(results: Results, truth: Results) -> Errors:
    """The errors of `results`; NaN in a result gives NaN, which no limit lets through."""
    norm, single = {}, {}
    for (name, got), (_, true) in zip(results.items(), truth.items(), strict=True):
        true = true.double()
        off, size = got.double() - true, float(true.norm())
        terms = truth.terms.get(name) or 1.0
        norm[name] = float(off.norm()) / (size or terms)
        single[name] = _largest(off) / (_largest(true) if size else terms)
    return Errors(norm, single)


def limit(dtype: torch.dtype, device: Errors) -> Errors:
    """What errors may be, given those of one device (not looked at for float64)."""
    if dtype == torch.float64:
        return Errors(dict.fromkeys(NAMES, FLOAT64_LIMIT), dict.fromkeys(NAMES, FLOAT64_LIMIT))
    slack = LAST_PLACES * torch.finfo(dtype).eps
    return Errors(
        {name: DEVICE_FACTOR * error + slack for name, error in device.norm.items()},
        {name: SINGLE_FACTOR * error + slack for name, error in device.single.items()},
    )


def above(errors: Errors, limits: Errors) -> list[str]:
    """What is above its limit, as texts such as ``dk: error 3e-2, limit 1e-2``, or nothing."""
    out = []
    for kind in ("norm", "single"):
        found, most = getattr(errors, kind), getattr(limits, kind)
        what = "error" if kind == "norm" else "largest single error"
        for name in NAMES:
            if not found[name] <= most[name]:
                out.append(f"{name}: {what} {found[name]:.3g}, limit {most[name]:.3g}")
    return out


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def _longest(x: Tensor) -> float:
    """The largest norm of a row."""
    return float(x.double().norm(dim=-1).max()) if x.numel() else 0.0
