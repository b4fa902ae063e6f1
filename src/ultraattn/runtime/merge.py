"""Turns partial results into one: attention outputs by their LSE, gradients by plain sums.

Partial attention over disjoint sets of keys is (O_p, LSE_p). With m = max_p LSE_p and
w_p = exp(LSE_p - m), the whole is O = sum_p w_p O_p / sum_p w_p and LSE = m + log sum_p w_p
(the online softmax of Milakov and Gimelshein 2018, for n parts at once: one rounding per element,
however many parts). (0, -inf) is the identity of this operation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ultraattn.errors import InputError
from ultraattn.runtime.fold import add, can_fold, fold

NEG_INF = float("-inf")


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that LSEs are kept in and sums are made in: float64 for float64, else float32.

    >>> accumulate_dtype(torch.bfloat16)
    torch.float32
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def merge_partials(
    outs: Sequence[Tensor],
    lses: Sequence[Tensor],
    out_dtype: torch.dtype | None = None,
    *,
    out: Tensor | None = None,
    lse_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Merges partial attention results over disjoint keys, exactly and stably.

    Args:
        outs: parts of O, each (batch, heads, rows, dim_v), of any floating dtype and strides.
            What stands in a row whose LSE is -inf is ignored, NaN included.
        lses: their natural-log LSEs, each (batch, heads, rows), float32 or float64.
        out_dtype: dtype of the result, by default that of ``outs[0]``; cast to once, at the end.
        out: where to write O, any strides; its dtype then is the result's.
        lse_out: where to write the LSE, any strides.

    Returns:
        O of (batch, heads, rows, dim_v), and its LSE of (batch, heads, rows) in the accumulation
        dtype; rows that no part has seen are (0, -inf).

    Raises:
        InputError: no parts, as many LSEs as there are not parts, or shapes that differ.
    """
    _check_parts(outs, lses)
    if outs[0].device.type == "cuda" and can_fold(*outs, *lses):
        dtype = out_dtype or outs[0].dtype
        out = torch.empty_like(outs[0], dtype=dtype) if out is None else out
        lse_out = torch.empty_like(lses[0]) if lse_out is None else lse_out
        return fold(outs, lses, _shaped(out, outs[0]), _shaped(lse_out, lses[0]))
    wide = torch.float32
    if any(x.dtype == torch.float64 for x in (*outs, *lses)):
        wide = torch.float64

    top = lses[0].to(wide)
    for lse in lses[1:]:
        top = torch.maximum(top, lse.to(wide))
    shift = top.masked_fill(top == NEG_INF, 0.0)
    weights = [torch.exp(lse.to(wide) - shift) for lse in lses]
    total = weights[0].clone()
    for weight in weights[1:]:
        total += weight
    lse_sum = top + torch.log(total.masked_fill(total == 0, 1.0))
    divisor = total.masked_fill(total == 0, 1.0)

    summed = torch.zeros(outs[0].shape, dtype=wide, device=outs[0].device)
    for part, lse, weight in zip(outs, lses, weights, strict=True):
        summed.addcmul_(_live_rows(part, lse).to(wide), (weight / divisor)[..., None])
    return _deliver(summed, out_dtype or outs[0].dtype, out), _deliver(lse_sum, wide, lse_out)


def sum_partials(
    parts: Sequence[Tensor], out_dtype: torch.dtype | None = None, *, out: Tensor | None = None
) -> Tensor:
    """Adds tensors of one shape in the accumulation dtype, in order, and casts once.

    Args:
        parts: tensors of one shape, of any floating dtypes and strides; none is written to.
        out_dtype: dtype of the sum, by default that of ``parts[0]``.
        out: where to write it, any strides; its dtype then is the result's.

    Raises:
        InputError: no parts, or shapes that differ.
    """
    if not parts:
        raise InputError("no parts to add; expected at least one tensor")
    for part in parts[1:]:
        if part.shape != parts[0].shape:
            raise InputError(
                f"parts of shapes {tuple(parts[0].shape)} and {tuple(part.shape)} cannot be added; "
                "pass parts of one shape"
            )
    dtype = out_dtype or parts[0].dtype
    if len(parts) == 1:
        return _deliver(parts[0], dtype, out, fresh=False)
    if parts[0].device.type == "cuda" and parts[0].ndim == 4 and can_fold(*parts):
        out = torch.empty_like(parts[0], dtype=dtype) if out is None else out
        return add(parts, _shaped(out, parts[0]))
    wide = torch.float32
    if any(part.dtype == torch.float64 for part in parts):
        wide = torch.float64
    summed = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        summed += part
    return _deliver(summed, dtype, out)


def _live_rows(part: Tensor, lse: Tensor) -> Tensor:
    """`part` with zeros where its LSE is -inf (0 x NaN is NaN, so weights alone do not do)."""
    dead = lse == NEG_INF
    # Looking saves a pass over O; on a GPU it would stall the stream and break graph capture.
    if part.device.type == "cpu" and not bool(dead.any()):
        return part
    return part.masked_fill(dead[..., None], 0.0)


def _deliver(value: Tensor, dtype: torch.dtype, out: Tensor | None, fresh: bool = True) -> Tensor:
    """`value` cast once, into `out` where one is given; never an alias of it unless `fresh`."""
    if out is None:
        return value.to(dtype, copy=not fresh)
    return _shaped(out, value).copy_(value)


def _shaped(out: Tensor, value: Tensor) -> Tensor:
    """`out`, if it has the shape of `value`."""
    if out.shape != value.shape:
        raise InputError(
            f"destination of shape {tuple(out.shape)} for a result of shape {tuple(value.shape)}; "
            "pass one of the result's shape"
        )
    return out


def _check_parts(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> None:
    if not outs or len(outs) != len(lses):
        raise InputError(
            f"{len(outs)} partial outputs and {len(lses)} LSEs: expected as many of both, "
            "at least one"
        )
    for index, (part, lse) in enumerate(zip(outs, lses, strict=True)):
        if part.shape != outs[0].shape or lse.shape != part.shape[:-1]:
            raise InputError(
                f"partial result {index}: O {tuple(part.shape)} and LSE {tuple(lse.shape)}; "
                f"expected O {tuple(outs[0].shape)} and LSE {tuple(outs[0].shape[:-1])}"
            )
