"""Turns partial results into one: exact merges of (O, LSE), sums of gradients, joins, fills."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from torch import Tensor as Array

from ultraattn.plans.program import Value
from ultraattn.plans.tensors import Tensor
from ultraattn.runtime.copies import copy
from ultraattn.runtime.fold import can_fold, row_dots
from ultraattn.runtime.merge import merge_partials, sum_partials
from ultraattn.runtime.pieces import Pieces, copy_overlap, is_summed, part_of

Rectangle = tuple[int, int, int, int]


def fill(places: Mapping[int, Array], values: Mapping[int, Value]) -> None:
    """Zeros; minus infinity for an LSE: what a row that sees nothing gives."""
    for number, place in places.items():
        place.fill_(float("-inf") if values[number].tensor is Tensor.LSE else 0.0)


def join_parts(
    places: Mapping[int, Array],
    parts: Mapping[int, Sequence[int]],
    values: Mapping[int, Value],
    pieces: Pieces,
) -> None:
    """Copies pieces side by side into larger values, changing the dtype where it differs."""
    for number, place in places.items():
        for part in parts[number]:
            copy_overlap(place, values[number], pieces.get(part), values[part])


def delta(
    places: Mapping[int, Array],
    parts: Mapping[int, tuple[int, ...]],
    values: Mapping[int, Value],
    pieces: Pieces,
) -> None:
    """delta = rowsum(dO * O), less the gradient of the LSE where the caller gave one.

    With L = LSE a further output, dS = P * (dO V^T - rowsum(dO * O) + dL): the gradient of the LSE
    takes the place of a smaller delta.
    """
    for number, place in places.items():
        value = values[number]
        if _adopt_own_delta(number, parts[number], values, pieces):
            continue
        heads = (value.head_start, value.head_stop)
        dout, out = (
            pieces.assemble(parts[number], tensor, value.chunk, heads)
            for tensor in (Tensor.DO, Tensor.O)
        )
        rows = slice(value.row_start, value.row_stop)
        dout, out = dout[:, :, rows], out[:, :, rows]
        if dout.device.type == "cuda" and can_fold(dout, out, place):
            row_dots(dout, out, place)
        else:
            place.copy_((dout.to(place.dtype) * out.to(place.dtype)).sum(-1))
        if Tensor.DELTA in pieces.own:
            place.sub_(pieces.own_place(number))


def _adopt_own_delta(
    number: int, parts: Sequence[int], values: Mapping[int, Value], pieces: Pieces
) -> bool:
    """Lets a delta be part of one pass over all of the rank's own rows, where that can be.

    Spares a launch for every chunk.
    """
    dout, out = pieces.own[Tensor.DO], pieces.own[Tensor.O]
    if any(values[n].buffer >= 0 for n in parts) or dout.device.type != "cuda":
        return False
    if dout.shape[-1] != out.shape[-1] or not can_fold(dout, out):
        return False
    value = values[number]
    start = pieces.q_layout.offsets[value.chunk]
    rows = slice(start + value.row_start, start + value.row_stop)
    some = pieces.own_deltas()[:, value.head_start : value.head_stop, rows]
    return pieces.adopt(number, some)


def merge(
    places: Mapping[int, Array],
    parts: Mapping[int, Sequence[int]],
    values: Mapping[int, Value],
    pieces: Pieces,
) -> None:
    """Merges, for each place, the partial results in `parts`, piece by piece where they differ."""
    for number, place in places.items():
        value = values[number]
        if value.tensor is Tensor.LSE:
            continue
        lse_number = _partner(number, places, values) if value.tensor is Tensor.O else -1
        for rectangle in _atoms(value, [values[n] for n in parts[number]]):
            atom = Value(value.tensor, value.chunk, *rectangle, rank=value.rank)
            here = [n for n in parts[number] if values[n].contains(atom)]
            tensors = [part_of(pieces.get(n), values[n], atom) for n in here]
            target = part_of(place, value, atom)
            if len(tensors) == 1 and _is_same(tensors[0], target):
                continue  # written there at once
            if len(here) == 1:
                copy(target, tensors[0])
                if not is_summed(value):
                    lse = _lse_of(here[0], parts[lse_number], values, pieces, atom)
                    copy(part_of(places[lse_number], values[lse_number], atom), lse)
                continue
            if is_summed(value):
                sum_partials(tensors, out=target)
                continue
            lses = [_lse_of(n, parts[lse_number], values, pieces, atom) for n in here]
            lse_target = part_of(places[lse_number], values[lse_number], atom)
            merge_partials(tensors, lses, out=target, lse_out=lse_target)


def _is_same(a: Array, b: Array) -> bool:
    return (a.data_ptr(), a.dtype, a.shape, a.stride()) == (
        b.data_ptr(), b.dtype, b.shape, b.stride(),
    )  # fmt: skip


def _partner(number: int, places: Mapping[int, Array], values: Mapping[int, Value]) -> int:
    o = values[number]
    return next(
        n
        for n in places
        if values[n].tensor is Tensor.LSE
        and values[n].chunk == o.chunk
        and _rectangle(values[n]) == _rectangle(o)
    )


def _lse_of(
    number: int,
    candidates: Sequence[int],
    values: Mapping[int, Value],
    pieces: Pieces,
    atom: Value,
) -> Array:
    """The LSE of a partial O: the one with the same cover that holds the piece."""
    o = values[number]
    found = next(n for n in candidates if values[n].cover == o.cover and values[n].contains(atom))
    return part_of(pieces.get(found), values[found], atom)


def _rectangle(value: Value) -> Rectangle:
    return value.row_start, value.row_stop, value.head_start, value.head_stop


def _atoms(value: Value, parts: Sequence[Value]) -> list[Rectangle]:
    """The rectangles into which the edges of all parts cut a value."""
    if all(_rectangle(part) == _rectangle(value) for part in parts):
        return [_rectangle(value)]
    rows = {value.row_start, value.row_stop}
    heads = {value.head_start, value.head_stop}
    for part in parts:
        rows |= {r for r in (part.row_start, part.row_stop) if value.row_start < r < value.row_stop}
        heads |= {
            h for h in (part.head_start, part.head_stop) if value.head_start < h < value.head_stop
        }
    row_cuts, head_cuts = sorted(rows), sorted(heads)
    return [(a, b, c, d) for a, b in pairwise(row_cuts) for c, d in pairwise(head_cuts)]
