"""Dense attention on one process in float64, by the formulas: what every result is held against.

Shares no code with the kernels. A few rows at a time, so scores stay below `SCORE_BYTES`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ultraattn.errors import InputError

SCORE_BYTES = 4 << 20

Visible = Tensor | Callable[[Tensor], Tensor] | None
"""What is visible: None (everything), a bool tensor (rows, keys) or (1 or heads, rows, keys), or a
function that gives such a tensor for some rows (int64 positions)."""


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Visible = None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """O = softmax(scale Q K^T) V and LSE = logsumexp(scale Q K^T) over visible keys.

    Args:
        q: (batch, heads, rows, dim), any floating dtype.
        k: (batch, kv_heads, keys, dim); query head h takes key head ``h * kv_heads // heads``.
        v: (batch, kv_heads, keys, dim_v).
        visible: see `Visible`.
        scale: factor of the scores, ``dim ** -0.5`` unless told.

    Returns:
        O (batch, heads, rows, dim_v) and LSE (batch, heads, rows) in float64; rows that see nothing
        are (0, -inf).
    """
    qd, kd, vd, factor = _prepared(q, k, v, scale)
    out = qd.new_zeros((*qd.shape[:3], vd.shape[-1]))
    lse = qd.new_full(qd.shape[:3], float("-inf"))
    for one, rows, unseen in _pieces(qd, kd, visible):
        probs, lse[one][rows] = _softmax(factor * qd[one][rows], kd[one], unseen)
        out[one][rows] = probs @ vd[one]
    return out, lse


def dense_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Visible = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK and dV of `dense_attention` for the gradient `dout` of O, in float64.

    With P = softmax(S): dV = P^T dO, dP = dO V^T, dS = P * (dP - rowsum(P * dP)),
    dQ = scale dS K, dK = scale dS^T Q; the query heads of a group add up in dK and dV.
    """
    qd, kd, vd, factor = _prepared(q, k, v, scale)
    dq, dk, dv = torch.zeros_like(qd), torch.zeros_like(kd), torch.zeros_like(vd)
    for one, rows, unseen in _pieces(qd, kd, visible):
        probs, _ = _softmax(factor * qd[one][rows], kd[one], unseen)
        do = dout[one][rows].double()
        dv[one].addmm_(probs.mT, do)
        dprobs = do @ vd[one].mT
        dscores = probs * (dprobs - (probs * dprobs).sum(dim=-1, keepdim=True))
        torch.mm(dscores, kd[one], out=dq[one][rows]).mul_(factor)
        dk[one].addmm_(dscores.mT, qd[one][rows], alpha=factor)
    return dq, _summed_groups(dk, k.shape[1]), _summed_groups(dv, k.shape[1])


def _prepared(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Everything in float64, key heads repeated for their query heads, and the scale."""
    heads, kv_heads = q.shape[1], k.shape[1]
    if kv_heads == 0 or heads % kv_heads or v.shape[:3] != k.shape[:3] or q.shape[3] != k.shape[3]:
        raise InputError(
            f"queries {tuple(q.shape)}, keys {tuple(k.shape)}, values {tuple(v.shape)}: expected "
            "(batch, heads, rows, dim), (batch, kv_heads, keys, dim), (batch, kv_heads, keys, "
            "dim_v), with heads a multiple of kv_heads"
        )
    repeats = heads // kv_heads
    kd, vd = (x.detach().double().repeat_interleave(repeats, dim=1) for x in (k, v))
    return q.detach().double(), kd, vd, q.shape[-1] ** -0.5 if scale is None else scale


def _summed_groups(grad: Tensor, kv_heads: int) -> Tensor:
    """(batch, heads, keys, dim) to (batch, kv_heads, keys, dim)."""
    batch, heads, keys, dim = grad.shape
    return grad.view(batch, kv_heads, heads // kv_heads, keys, dim).sum(dim=2)


def _pieces(
    q: Tensor, k: Tensor, visible: Visible
) -> Iterator[tuple[tuple[int, int], slice, Tensor | None]]:
    """(entry of the batch, head), rows whose scores fit in `SCORE_BYTES`, and what they do not see
    as a bool tensor (rows, keys), or None where they see everything."""
    step = max(1, SCORE_BYTES // max(1, 8 * k.shape[2]))
    for top in range(0, q.shape[2], step):
        rows = slice(top, min(q.shape[2], top + step))
        unseen = None
        if visible is not None:
            some = torch.arange(rows.start, rows.stop, device=q.device)
            seen = visible[..., rows, :] if isinstance(visible, Tensor) else visible(some)
            unseen = (~seen.to(q.device)).expand(q.shape[1], -1, -1)
        for entry, head in itertools.product(range(q.shape[0]), range(q.shape[1])):
            yield (entry, head), rows, None if unseen is None else unseen[head]


def _softmax(q: Tensor, k: Tensor, unseen: Tensor | None) -> tuple[Tensor, Tensor]:
    """Softmax of q k^T (rows, keys), and its LSE (rows); (0, -inf) in rows that see nothing."""
    scores = q @ k.mT
    if unseen is not None:
        scores.masked_fill_(unseen, float("-inf"))
    if not scores.shape[-1]:
        return scores, scores.new_full(scores.shape[:1], float("-inf"))
    top = scores.amax(dim=-1, keepdim=True)
    weights = scores.sub_(top.masked_fill(top == float("-inf"), 0.0)).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    lse = (top + total.log()).squeeze(-1)
    return weights.div_(total.masked_fill(total == 0, 1.0)), lse
