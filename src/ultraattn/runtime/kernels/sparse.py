"""Attention over any set of blocks in one launch, by lists of the tiles that hold visible pairs.

One launch forward and three backward (one packs LSEs and deltas), whatever the number of chunks,
from the global LSE and delta as they are. Every sum is made in one program in a fixed order, so it
is deterministic; the heads of a group are summed in float32. Results are written where they belong.
What it costs follows the tiles in the lists (`ultraattn.runtime.kernels.lists`), which are made
once for a set of blocks and stay on the device.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ultraattn.masks.grid import BlockKind
from ultraattn.runtime.kernels import sparse_triton as device_code
from ultraattn.runtime.kernels.addresses import (
    alignment,
    alike,
    deliver,
    key_lines,
    line,
    precision,
    tables,
    unit,
    width,
    writable,
)
from ultraattn.runtime.kernels.base import Piece
from ultraattn.runtime.kernels.block_set import SIZES, STATS, BlockSet, Extent, Place, Sizes, sizes
from ultraattn.runtime.kernels.fused import even_groups, ungroup
from ultraattn.runtime.kernels.lists import Bools, Cell, Truth
from ultraattn.runtime.merge import NEG_INF
from ultraattn.runtime.tritons import has_triton

__all__ = [
    "SIZES",
    "BlockSet",
    "Extent",
    "Place",
    "Sizes",
    "backward",
    "backward_set",
    "forward",
    "forward_set",
    "name",
    "refusal",
    "refusal_of",
]

name = "sparse"

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LOG2_E = 1.4426950408889634


def refusal(q: Tensor, piece: Piece, deterministic: bool) -> str | None:
    """Why the kernels cannot serve these, or None; they are deterministic always."""
    return refusal_of(q.device, q.dtype, q.shape[-1], piece.v.shape[-1])


def refusal_of(device: torch.device, dtype: torch.dtype, dim: int, dim_v: int) -> str | None:
    """Why the kernels cannot serve tensors like these, or None."""
    if device.type != "cuda" and not interpreted():
        return f"it runs on CUDA and the query is on {device}"
    if not has_triton():
        return "it needs Triton, which is not installed"
    if dtype not in DTYPES:
        return f"dtype {dtype} is none of {', '.join(map(str, DTYPES))}"
    for some in (dim, dim_v):
        if not 1 <= some <= 256:
            return f"head_dim {some} is not from 1 to 256"
    return None


def interpreted() -> bool:
    """Whether Triton interprets its kernels, on any device (TRITON_INTERPRET=1, for tests)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@torch.no_grad()
def forward_set(
    blocks: BlockSet,
    q: Sequence[Tensor],
    kv: Sequence[tuple[Tensor, Tensor]],
    places: Sequence[Place],
    scale: float,
) -> None:
    """Writes O and LSE of every place: attention of its rows over the blocks of the set.

    Args:
        blocks: the set.
        q: for each query chunk (batch, heads, rows, dim).
        kv: for each key chunk K (batch, kv_heads, columns, dim) and V (.., dim_v).
        places: O (batch, heads, rows, dim_v) and LSE (batch, heads, rows) in float32; rows that
            see nothing become (0, -inf).
        scale: factor of the scores.
    """
    places, late = writable(places)
    if not places or not q[0].shape[0]:
        return
    q, ks, vs = [unit(x) for x in q], [unit(k) for k, _ in kv], [unit(v) for _, v in kv]
    first, dim, dim_v = q[0], q[0].shape[-1], places[0].tensors[0].shape[-1]
    k0, v0 = (ks or q)[0], (vs or q)[0]
    align = alignment(*q, *ks, *vs)
    out, lse = places[0].tensors
    batch = range(first.shape[0])
    majors = [
        number
        for b in batch
        for p in places
        for number in (
            *line(q[p.chunk], first, blocks.queries[p.chunk].heads, b, align),
            *line(p.tensors[0], out, p.heads, b),
            *line(p.tensors[1], lse, p.heads, b)[:2],
        )
    ]
    numbers = key_lines(blocks, ks, vs, k0, v0, batch, align)
    lines, minors = tables(first.device, majors, numbers)
    widths = width(dim), width(dim_v)
    size = sizes("forward", first.dtype, max(widths))
    lists = blocks.lists("forward", size, places)
    device_code.forward[(len(lists.arrays[0]), len(batch))](
        first, k0, v0, out, lse, lines, minors, *lists.arrays,
        len(places), len(blocks.keys), blocks.group, scale * LOG2_E, dim, dim_v,
        k0.stride(2) // align, v0.stride(2) // align, *widths,
        size.major, size.minor, align, scale > 0, precision(first),
        dim == widths[0], dim_v == widths[1], alike(ks) and alike(vs),
        num_warps=size.warps, num_stages=size.stages,
    )  # fmt: skip
    deliver(late)


@torch.no_grad()
def backward_set(
    blocks: BlockSet,
    dout: Sequence[Tensor],
    q: Sequence[Tensor],
    lse: Sequence[Tensor],
    delta: Sequence[Tensor],
    kv: Sequence[tuple[Tensor, Tensor]],
    dq_places: Sequence[Place],
    dkv_places: Sequence[Place],
    scale: float,
) -> None:
    """Writes the blocks' share of dQ, and of dK and dV, of every place.

    Args:
        blocks: the set.
        dout: for each query chunk the gradient of the global output, (batch, heads, rows, dim_v).
        q: (batch, heads, rows, dim).
        lse: global LSEs (batch, heads, rows); rows at -inf get and give zero gradients.
        delta: rowsum(dO * O) with the global O, (batch, heads, rows).
        kv: for each key chunk K and V, as in `forward_set`.
        dq_places: dQ (batch, heads, rows, dim).
        dkv_places: dK (batch, kv_heads, columns, dim) and dV (.., dim_v).
        scale: factor of the scores.
    """
    dq_places, late = writable(dq_places)
    dkv_places, more = writable(dkv_places)
    if not q or not kv or not q[0].shape[0]:
        for place in (*dq_places, *dkv_places):
            for x in place.tensors:
                x.zero_()
        deliver([*late, *more])
        return
    q, dout = [unit(x) for x in q], [unit(x.to(q[0].dtype)) for x in dout]
    ks, vs = [unit(k) for k, _ in kv], [unit(v) for _, v in kv]
    lse, delta = [unit(x.float()) for x in lse], [unit(x.float()) for x in delta]
    first, batch = q[0], range(q[0].shape[0])
    dim, dim_v = first.shape[-1], vs[0].shape[-1]
    widths, align = (width(dim), width(dim_v)), alignment(*q, *dout, *ks, *vs)
    edges, spans = blocks.packed, [x.heads for x in blocks.queries]
    heads, length = max(h for _, h in spans), edges[-1]
    shifts, centres = (
        torch.empty((len(batch), heads, length), dtype=torch.float32, device=first.device)
        for _ in range(2)
    )
    query_lines = [
        [
            (*line(x, first, span, b, align), *line(y, dout[0], span, b, align), edge)
            for x, y, span, edge in zip(q, dout, spans, edges, strict=False)
        ]
        for b in batch
    ]
    stats = [
        number
        for b in batch
        for x, y, span, edge in zip(lse, delta, spans, edges, strict=False)
        for number in (*line(x, lse[0], span, b)[:2], *line(y, delta[0], span, b)[:2], edge)
    ]
    dkv_lines = [
        number
        for b in batch
        for p in dkv_places
        for number in (
            *line(ks[p.chunk], ks[0], blocks.keys[p.chunk].heads, b, align),
            *line(vs[p.chunk], vs[0], blocks.keys[p.chunk].heads, b, align),
            *line(p.tensors[0], dkv_places[0].tensors[0], p.heads, b),
            *line(p.tensors[1], dkv_places[0].tensors[1], p.heads, b),
        )
    ]
    dq_lines = [
        number
        for b in batch
        for p in dq_places
        for number in (
            *query_lines[b][p.chunk][:6],
            *line(p.tensors[0], dq_places[0].tensors[0], p.heads, b),
            query_lines[b][p.chunk][6],
        )
    ]
    stats_at, queries_at, dkv_at, dq_at, keys_at = tables(
        first.device,
        stats,
        [n for some in query_lines for numbers in some for n in numbers],
        dkv_lines,
        dq_lines,
        key_lines(blocks, ks, vs, ks[0], vs[0], batch, align),
    )
    chunks = blocks.stats()
    device_code.prepare[(len(chunks), heads, len(batch))](
        lse[0], delta[0], shifts, centres, stats_at, chunks, len(q), heads, length, STATS,
        num_warps=4,
    )  # fmt: skip
    common = (blocks.group, heads, length, scale, scale * LOG2_E, dim, dim_v)
    if dkv_places:
        size = sizes("dkv", first.dtype, max(widths))
        lists = blocks.lists("dkv", size, dkv_places)
        device_code.dkv[(len(lists.arrays[0]), len(batch))](
            first, ks[0], vs[0], dout[0], shifts, centres, *dkv_places[0].tensors, dkv_at,
            queries_at, *lists.arrays, len(dkv_places), len(q), *common, first.stride(2) // align,
            dout[0].stride(2) // align, *widths, size.major, size.minor, align, precision(first),
            dim == widths[0], dim_v == widths[1],
            max(widths) <= 64 and alike(q) and alike(dout),
            num_warps=size.warps, num_stages=size.stages,
        )  # fmt: skip
    if dq_places:
        size = sizes("dq", first.dtype, max(widths))
        lists = blocks.lists("dq", size, dq_places)
        device_code.dq[(len(lists.arrays[0]), len(batch))](
            first, ks[0], vs[0], dout[0], shifts, centres, *dq_places[0].tensors, dq_at, keys_at,
            *lists.arrays,
            len(dq_places), len(ks), *common, ks[0].stride(2) // align, vs[0].stride(2) // align,
            *widths, size.major, size.minor, align, precision(first), dim == widths[0],
            dim_v == widths[1], alike(ks) and alike(vs),
            num_warps=size.warps, num_stages=size.stages,
        )  # fmt: skip
    deliver([*late, *more])


# One piece at a time


@torch.no_grad()
def forward(q: Tensor, piece: Piece, scale: float) -> tuple[Tensor, Tensor]:
    """O in the query's dtype and LSE in float32; see `Kernel.forward`."""
    piece = even_groups(piece)
    batch, heads, rows, _ = q.shape
    lse = q.new_empty((batch, heads, rows), dtype=torch.float32)
    out = q.new_empty((batch, rows, heads, piece.v.shape[-1])).transpose(1, 2)
    if _nothing(q, piece):
        return out.zero_(), lse.fill_(NEG_INF)
    places = [Place(0, (0, heads), (out, lse))]
    forward_set(_alone(q, piece), [q], [(piece.k, piece.v)], places, scale)
    return out, lse


@torch.no_grad()
def backward(
    dout: Tensor, q: Tensor, lse: Tensor, delta: Tensor, piece: Piece, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK, dV in float32; see `Kernel.backward`."""
    given, piece = piece, even_groups(piece)
    dq, dk, dv = (
        torch.empty(x.shape, dtype=torch.float32, device=q.device) for x in (q, piece.k, piece.v)
    )
    if _nothing(q, piece):
        for x in (dq, dk, dv):
            x.zero_()
    else:
        backward_set(
            _alone(q, piece), [dout], [q], [lse], [delta], [(piece.k, piece.v)],
            [Place(0, (0, q.shape[1]), (dq,))], [Place(0, (0, piece.k.shape[1]), (dk, dv))], scale,
        )  # fmt: skip
    return dq, ungroup(dk, given, piece), ungroup(dv, given, piece)


def _nothing(q: Tensor, piece: Piece) -> bool:
    return q.numel() == 0 or piece.cols == 0 or piece.kind is BlockKind.EMPTY


_of_mask = WeakIdKeyDictionary()


def _alone(q: Tensor, piece: Piece) -> BlockSet:
    """The set of one piece; that of a mask lives as long as the mask."""
    key = (
        q.shape[2], piece.cols, q.shape[1], piece.k.shape[1], piece.kind, piece.lo, piece.hi,
        q.device,
    )  # fmt: skip
    mask = piece.mask
    if piece.kind is not BlockKind.PARTIAL or mask is None:
        return _of_band(*key)
    found = _of_mask.get(mask)  # type: ignore[no-untyped-call]
    if found is None:
        on_host = mask.cpu().numpy()

        def truth(head: int, first: int, last: int, by_minor: bool) -> Bools:
            table = on_host[head if len(on_host) > 1 else 0]
            strip: Bools = table[:, first:last].T if by_minor else table[first:last]
            return strip

        found = _of_mask[mask] = _single(*key, truth, len(on_host) > 1)
    return found  # type: ignore[no-any-return]


@lru_cache(maxsize=256)
def _of_band(*key: Any) -> BlockSet:
    return _single(*key)


def _single(
    rows: int, cols: int, heads: int, kv_heads: int, kind: BlockKind, lo: int, hi: int,
    device: torch.device, truth: Truth | None = None, by_head: bool = False,
) -> BlockSet:  # fmt: skip
    cell = Cell(0, 0, (0, heads), kind, lo, hi, truth, by_head)
    return BlockSet(
        (Extent(rows, (0, heads)),), (Extent(cols, (0, kv_heads)),), (cell,), heads // kv_heads,
        device,
    )  # fmt: skip
