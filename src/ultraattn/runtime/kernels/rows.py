"""Turns the pieces of one query chunk into its attention over them, and back to their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ultraattn.errors import InputError, MissingExtraError
from ultraattn.masks.grid import BlockKind
from ultraattn.runtime.kernels import cudnn, fa4, flash2, reference, sparse, torch_cpu
from ultraattn.runtime.kernels.base import Kernel, Piece, check_piece
from ultraattn.runtime.merge import NEG_INF, accumulate_dtype, merge_partials, sum_partials

KERNELS: tuple[Kernel, ...] = (torch_cpu, cudnn, fa4, sparse, flash2, reference)
"""In order of preference, the fastest first; the last serves everything."""

NAMES: tuple[str, ...] = ("auto", *(kernel.name for kernel in KERNELS))
"""What `kernel=` takes; "auto" is the first kernel that can."""


def check_name(name: str) -> None:
    """Checks that a kernel of that name, or "auto", can be asked for here.

    Raises:
        InputError: no kernel has that name; the text has those that do.
        MissingExtraError: its package is not installed; the text names the extra.
    """
    if name not in NAMES:
        raise InputError(f"kernel {name!r} is unknown; expected one of {', '.join(NAMES)}")
    why = fa4.missing() if name == fa4.name else None
    if why is not None:
        raise MissingExtraError(f"kernel {name!r}: {why}; or pass kernel='auto'")


def choose(q: Tensor, piece: Piece, name: str = "auto", deterministic: bool = False) -> Kernel:
    """The kernel of that name, or the first that can serve these for "auto".

    Raises:
        InputError: no kernel has that name, or the one that has cannot serve these; the text
            says why and names those that can.
        MissingExtraError: the package of the kernel of that name is not installed.
    """
    check_name(name)
    for kernel in KERNELS:
        if name in ("auto", kernel.name) and kernel.refusal(q, piece, deterministic) is None:
            return kernel
    refusals = {kernel.name: kernel.refusal(q, piece, deterministic) for kernel in KERNELS}
    able = [kernel for kernel in KERNELS if refusals[kernel.name] is None]
    if name != "auto":
        others = ", ".join(kernel.name for kernel in able) or "none"
        raise InputError(
            f"kernel {name!r} cannot serve this {piece.kind} piece: {refusals[name]}; "
            f"those that can: {others} (or pass kernel='auto')"
        )
    reasons = "; ".join(f"{kernel}: {why}" for kernel, why in refusals.items())
    raise InputError(f"no kernel can serve this {piece.kind} piece ({reasons})")


def forward_row(
    q: Tensor,
    pieces: Sequence[Piece],
    scale: float,
    *,
    kernel: str = "auto",
    deterministic: bool = False,
    dim_v: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of one query chunk over several pieces with disjoint pairs.

    Args:
        q: (batch, heads, rows, dim), any strides.
        pieces: key chunks; none at all is fine.
        scale: factor of the scores.
        kernel: one of `NAMES`.
        deterministic: refuse kernels that are not.
        dim_v: head_dim of the values where there are no pieces; that of `q` unless told.

    Returns:
        O of (batch, heads, rows, dim_v) in the dtype of `q`, cast to once, and its natural-log LSE
        of (batch, heads, rows), contiguous, in the accumulation dtype. Rows that see nothing are
        (0, -inf).

    Raises:
        InputError: a piece does not fit its queries, or the kernel cannot serve it.
    """
    results = []
    for group in _groups(q, pieces):
        chosen = choose(q, group.piece, kernel, deterministic)
        results.append(chosen.forward(q, group.piece, scale))
    if not results:
        width = pieces[0].v.shape[-1] if pieces else q.shape[-1] if dim_v is None else dim_v
        lse = q.new_full(q.shape[:3], NEG_INF, dtype=accumulate_dtype(q.dtype))
        return q.new_zeros((*q.shape[:3], width)), lse
    if len(results) == 1:
        return results[0][0].to(q.dtype), results[0][1]
    outs, lses = zip(*results, strict=True)
    return merge_partials(outs, lses, q.dtype)


def backward_row(
    dout: Tensor,
    q: Tensor,
    lse: Tensor,
    delta: Tensor,
    pieces: Sequence[Piece],
    scale: float,
    *,
    kernel: str = "auto",
    deterministic: bool = False,
    wide: bool = False,
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Gradients of one query chunk and of the pieces it looks at.

    Args:
        dout: gradient of the global output, (batch, heads, rows, dim_v).
        q: (batch, heads, rows, dim).
        lse: global LSE, (batch, heads, rows); rows at -inf have zero gradients.
        delta: rowsum(dO * O) of the global O, (batch, heads, rows).
        pieces: as in `forward_row`.
        scale: factor of the scores.
        kernel: one of `NAMES`.
        deterministic: refuse kernels that are not.
        wide: leave gradients in the dtypes that kernels give, the query's or wider, for a caller
            that adds more to them; sums are in the accumulation dtype.

    Returns:
        dQ of the shape of `q`, and (dK, dV) of each piece in order, in the dtypes of their inputs
        (cast to once), or as kernels give them.

    Raises:
        InputError: a piece does not fit its queries, or the kernel cannot serve it.
    """
    dtype = accumulate_dtype(q.dtype) if wide else q.dtype
    partial_dqs: list[Tensor] = []
    grads: dict[int, tuple[Tensor, Tensor]] = {}
    for group in _groups(q, pieces):
        chosen = choose(q, group.piece, kernel, deterministic)
        dq, dk, dv = chosen.backward(dout, q, lse, delta, group.piece, scale)
        partial_dqs.append(dq)
        left = 0
        for index in group.members:
            right = left + pieces[index].cols
            some = dk[:, :, left:right], dv[:, :, left:right]
            grads[index] = some if wide else (some[0].to(dtype), some[1].to(dtype))
            left = right
    if not partial_dqs:
        partial_dqs = [torch.zeros(q.shape, dtype=dtype, device=q.device)]
    for index, piece in enumerate(pieces):
        if index not in grads:
            grads[index] = (
                torch.zeros(piece.k.shape, dtype=dtype, device=q.device),
                torch.zeros(piece.v.shape, dtype=dtype, device=q.device),
            )
    total = partial_dqs[0]
    if not wide or len(partial_dqs) > 1:
        total = sum_partials(partial_dqs, dtype)
    return total, [grads[index] for index in range(len(pieces))]


@dataclass(frozen=True, eq=False)
class _Group:
    """Pieces `members` (indices into the row's pieces) as one."""

    piece: Piece
    members: tuple[int, ...]


def _groups(q: Tensor, pieces: Sequence[Piece]) -> list[_Group]:
    """One group a kernel call: FULL pieces with one head map together, others alone.

    Pieces that see nothing are left out.
    """
    calls: dict[tuple[object, ...], list[int]] = {}
    for index, piece in enumerate(pieces):
        check_piece(q, piece)
        if piece.kind is BlockKind.EMPTY or piece.cols == 0:
            continue
        alike = (piece.kv_of_head, piece.k.shape[1], piece.v.shape[3])
        calls.setdefault(alike if piece.kind is BlockKind.FULL else (index,), []).append(index)
    return [_Group(_joined([pieces[i] for i in call]), tuple(call)) for call in calls.values()]


def _joined(pieces: Sequence[Piece]) -> Piece:
    """FULL pieces as one, their keys one after another."""
    if len(pieces) == 1:
        return pieces[0]
    k, v = _concatenated([p.k for p in pieces]), _concatenated([p.v for p in pieces])
    return replace(pieces[0], k=k, v=v)


def _concatenated(parts: Sequence[Tensor]) -> Tensor:
    """`parts` along dimension 2; a view where they already lie so in memory, else a copy."""
    first = parts[0]
    offset = first.storage_offset()
    for part in parts:
        beside = (
            part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            and part.stride() == first.stride()
            and part.storage_offset() == offset
        )
        if not beside:
            return torch.cat(list(parts), dim=2)
        offset += part.shape[2] * part.stride(2)
    batch, heads, _, dim = first.shape
    cols = sum(part.shape[2] for part in parts)
    return first.as_strided((batch, heads, cols, dim), first.stride())
