"""Turns a piece into calls of a fused CUDA operator, and their results into those of the piece.

An operator serves rectangles: full ones, causal ones aligned to the start, and (where it can)
bands. What it lacks is made of what it has. Keys before an end-aligned diagonal are a full
rectangle, and the rest starts on the diagonal:

    x x x . .        x x | x . .
    x x x x .   ->   x x | x x .      one full call, one causal call, merged by their LSE
    x x x x x        x x | x x x

Backward, operators want O where they only need delta = rowsum(dO * O); see `stand_in`.
Nothing here waits for the device, so that every call can be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from ultraattn.masks.grid import OPEN_HI, BlockKind
from ultraattn.runtime.kernels.base import Piece
from ultraattn.runtime.kernels.blocks import Rectangle, rectangles
from ultraattn.runtime.kernels.standin import stand_in
from ultraattn.runtime.merge import NEG_INF, accumulate_dtype, merge_partials

DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Operator:
    """A fused attention on CUDA.

    Attributes:
        forward: (q, k, v, rectangle, scale) to O and its natural LSE (batch, heads, rows).
        backward: (dO, q, k, v, O, LSE, rectangle, scale) to dQ, dK, dV.
        bands: whether it takes any band; else full and start-aligned causal rectangles alone.
    """

    forward: Callable[[Tensor, Tensor, Tensor, Rectangle, float], tuple[Tensor, Tensor]]
    backward: Callable[..., Sequence[Tensor]]
    bands: bool


def common_refusal(q: Tensor, piece: Piece, least: int, most: int) -> str | None:
    """Why no fused operator with head_dims from `least` to `most` can serve these, or None."""
    if q.device.type != "cuda":
        return f"it runs on CUDA and the query is on {q.device}"
    if q.dtype not in DTYPES:
        return f"dtype {q.dtype} is none of {', '.join(map(str, DTYPES))}"
    if piece.kind is BlockKind.PARTIAL:
        return "it takes full and banded blocks, and this one has a mask of its own"
    for width in (q.shape[-1], piece.v.shape[-1]):
        if not least <= width <= most or width % 8:
            return f"head_dim {width} is no multiple of 8 from {least} to {most}"
    return None


def is_startable(piece: Piece, rows: int) -> bool:
    """Whether full and start-aligned causal rectangles make up the piece."""
    return all(part.full or _opens_left(part) for part in _whole(piece, rows))


@torch.no_grad()
def forward(operator: Operator, q: Tensor, piece: Piece, scale: float) -> tuple[Tensor, Tensor]:
    """O in the query's dtype and LSE; see `Kernel.forward`."""
    rows = q.shape[2]
    piece = even_groups(piece)
    parts = [] if q.numel() == 0 else list(_parts(operator, piece, rows))
    by_rows: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
    for part in parts:
        some = slice(part.top, part.bottom), slice(part.left, part.right)
        tensors = (
            unit(q[:, :, some[0]]),
            unit(piece.k[:, :, some[1]]),
            unit(piece.v[:, :, some[1]]),
        )
        result = operator.forward(*tensors, part, scale)
        by_rows.setdefault((part.top, part.bottom), []).append(result)
    if len(by_rows) == 1 and (0, rows) in by_rows:
        return _merged(by_rows[0, rows], q.dtype)
    out = q.new_zeros((*q.shape[:3], piece.v.shape[-1]))
    lse = q.new_full(q.shape[:3], NEG_INF, dtype=accumulate_dtype(q.dtype))
    for (top, bottom), results in by_rows.items():
        out[:, :, top:bottom], lse[:, :, top:bottom] = _merged(results, q.dtype)
    return out, lse


@torch.no_grad()
def backward(
    operator: Operator,
    dout: Tensor,
    q: Tensor,
    lse: Tensor,
    delta: Tensor,
    piece: Piece,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK, dV in the accumulation dtype or the query's; see `Kernel.backward`.

    Rows of dO that are zero must have a zero delta, as they have unless the LSE has a gradient.
    """
    given, piece = piece, even_groups(piece)
    wide = accumulate_dtype(q.dtype)
    parts = [] if q.numel() == 0 else list(_parts(operator, piece, q.shape[2]))
    shapes = (q.shape, piece.k.shape, piece.v.shape)
    if not parts:
        dq, dk, dv = (torch.zeros(shape, dtype=wide, device=q.device) for shape in shapes)
        return dq, ungroup(dk, given, piece), ungroup(dv, given, piece)
    dout = unit(dout.to(q.dtype))
    out, lse = stand_in(dout, delta, lse)
    results = []
    for part in parts:
        rows, cols = slice(part.top, part.bottom), slice(part.left, part.right)
        tensors = (
            dout[:, :, rows],
            unit(q[:, :, rows]),
            unit(piece.k[:, :, cols]),
            unit(piece.v[:, :, cols]),
            out[:, :, rows],
            lse[:, :, rows].contiguous(),
        )
        results.append((rows, cols, operator.backward(*tensors, part, scale)))
    if len(parts) == 1 and (parts[0].rows, parts[0].cols) == (q.shape[2], piece.cols):
        dq, dk, dv = results[0][2]
    else:
        dq, dk, dv = (torch.zeros(shape, dtype=wide, device=q.device) for shape in shapes)
        for rows, cols, (some_dq, some_dk, some_dv) in results:
            dq[:, :, rows] += some_dq
            dk[:, :, cols] += some_dk
            dv[:, :, cols] += some_dv
    return dq, ungroup(dk, given, piece), ungroup(dv, given, piece)


def unit(x: Tensor) -> Tensor:
    """`x`, copied unless its last stride is 1 and its rows start at multiples of 16 bytes."""
    aligned = all(stride * x.element_size() % 16 == 0 for stride in x.stride()[:-1])
    if x.stride(-1) == 1 and aligned and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def even_groups(piece: Piece) -> Piece:
    """The piece with key heads that all serve as many query heads, in order, as operators ask.

    A slice where the map allows it, else one key head for each query head.
    """
    index = piece.kv_of_head
    if not index:
        return piece
    first = min(index)
    used = max(index) - first + 1
    even = tuple(h * used // len(index) for h in range(len(index)))
    if len(index) % used == 0 and tuple(head - first for head in index) == even:
        if used == piece.k.shape[1]:
            return piece
        some = slice(first, first + used)
        return replace(piece, k=piece.k[:, some], v=piece.v[:, some], kv_of_head=even)
    at = index_on(index, piece.k.device)
    k, v = piece.k.index_select(1, at), piece.v.index_select(1, at)
    return replace(piece, k=k, v=v, kv_of_head=tuple(range(len(index))))


def ungroup(grad: Tensor, given: Piece, used: Piece) -> Tensor:
    """Gradients of the key heads of `used`, added up to those of the `given` piece."""
    if used is given:
        return grad
    origin = dict(zip(used.kv_of_head, given.kv_of_head, strict=True))
    at = index_on(tuple(origin[head] for head in range(grad.shape[1])), grad.device)
    batch, _, cols, dim = grad.shape
    wide = accumulate_dtype(grad.dtype)
    total = grad.new_zeros((batch, given.k.shape[1], cols, dim), dtype=wide)
    return total.index_add_(1, at, grad.to(wide))


@lru_cache(maxsize=1024)
def index_on(index: tuple[int, ...], device: torch.device) -> Tensor:
    """Indices on a device, copied there once: a copy from the host cannot be captured."""
    return torch.tensor(index, device=device)


def _whole(piece: Piece, rows: int) -> Iterator[Rectangle]:
    """The piece as one rectangle with its band; none where nothing is visible."""
    return rectangles(piece, rows, max(1, rows), max(1, rows))


def _opens_left(part: Rectangle) -> bool:
    """Whether every query sees all keys up to a diagonal (of a trimmed rectangle)."""
    return part.hi >= part.rows - 1


def _parts(operator: Operator, piece: Piece, rows: int) -> Iterator[Rectangle]:
    """Rectangles that the operator takes, which hold the piece's pairs once."""
    for whole in _whole(piece, rows):
        if whole.full or (whole.causal and not operator.bands):
            yield whole
            continue
        if operator.bands:
            yield from _squat(whole)
            continue
        split = whole.left - whole.lo
        yield Rectangle(whole.top, whole.bottom, whole.left, split)
        yield Rectangle(whole.top, whole.bottom, split, whole.right, 0, OPEN_HI)


def _squat(part: Rectangle) -> Iterator[Rectangle]:
    """The part as bands with no more rows than columns, or full ones.

    A window counts from the end-aligned diagonal, at most as far as there are keys: with more
    rows than columns it cannot tell a limit from none.
    """
    if part.full or part.rows <= part.cols:
        yield part
        return
    for top, bottom in ((0, part.cols), (part.cols, part.rows)):
        some = part.take(top, bottom).trim()
        if some.rows:
            yield from _squat(some)


def _merged(results: list[tuple[Tensor, Tensor]], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    if len(results) == 1:
        return results[0][0], results[0][1].contiguous()
    outs, lses = zip(*results, strict=True)
    return merge_partials(outs, lses, dtype)
