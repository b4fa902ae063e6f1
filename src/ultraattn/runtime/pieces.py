"""Finds the values of a rank as tensors: the caller's own rows, and buffers that tasks fill."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor as Array

from ultraattn.enums import StrEnum
from ultraattn.plans.layout import Layout
from ultraattn.plans.program import Value
from ultraattn.plans.tensors import SUMMED, Tensor, Widths
from ultraattn.runtime.fold import row_dots

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class Between(StrEnum):
    """A tensor of a call that is no input and no result of attention."""

    KEPT = "kept"
    """What one rank keeps from forward to backward: flat, in the plan's dtype."""


Own = dict[Tensor | Between, Array]
"""The tensors of a call by name: the caller's, and what is kept."""


def value_bytes(value: Value, widths: Widths, batch: int) -> int:
    """Bytes of a value for a whole batch."""
    return batch * value.rows * value.heads * widths.row_bytes(value.tensor, value.wide)


def typed(buffer: Array, value: Value, widths: Widths, batch: int) -> Array:
    """A flat byte buffer as the value's tensor: (batch, heads, rows, width), or without width.

    In memory a value is (batch, rows, heads, width), so that a chunk of a model's tensors is one
    contiguous copy; LSE and delta are (batch, heads, rows).
    """
    flat = buffer.view(DTYPES[widths.element(value.tensor, value.wide)])
    if value.tensor in (Tensor.LSE, Tensor.DELTA):
        return flat.view(batch, value.heads, value.rows)
    width = widths.width(value.tensor)
    return flat.view(batch, value.rows, value.heads, width).transpose(1, 2)


def message_order(numbers: Sequence[int], values: Mapping[int, Value], widths: Widths) -> list[int]:
    """The order of values in a message: wide elements first, so that each is aligned."""

    def width(number: int) -> int:
        value = values[number]
        return DTYPES[widths.element(value.tensor, value.wide)].itemsize

    return sorted(numbers, key=lambda number: (-width(number), number))


def part_of(source: Array, held: Value, wanted: Value) -> Array:
    """The rows and heads of `wanted` within the tensor of `held`."""
    heads = slice(wanted.head_start - held.head_start, wanted.head_stop - held.head_start)
    rows = slice(wanted.row_start - held.row_start, wanted.row_stop - held.row_start)
    return source[:, heads, rows]


@dataclass
class Pieces:
    """The values of one rank during one call.

    `own` are the caller's tensors, (batch, heads, local tokens, width); results are written into
    theirs in place.
    """

    own: Own
    q_layout: Layout
    kv_layout: Layout
    values: Mapping[int, Value]
    widths: Widths
    batch: int
    stored: dict[int, Array] = field(default_factory=dict)
    _own: dict[int, Array] = field(default_factory=dict)
    _deltas: Array | None = None
    _assembled: dict[tuple[object, ...], Array] = field(default_factory=dict)
    """What `assemble` gave since the last `put` or `drop`: the blocks of a launch share chunks."""

    def get(self, number: int) -> Array:
        """The tensor of a value; a view, never a copy."""
        found = self.stored.get(number)
        return self.own_place(number) if found is None else found

    def view(self, number: int, buffer: Array) -> Array:
        """A flat byte buffer as the tensor of a value."""
        return typed(buffer, self.values[number], self.widths, self.batch)

    def put(self, number: int, buffer: Array) -> None:
        """Lets a value stand in a flat byte buffer."""
        self._assembled.clear()
        self.stored[number] = self.view(number, buffer)

    def adopt(self, number: int, tensor: Array) -> bool:
        """Lets a value be `tensor` in place of its buffer, if it has one and their dtypes agree.

        Spares a copy; what was in the buffer is lost.
        """
        known = self.stored.get(number)
        if known is None or known.dtype != tensor.dtype or known.shape != tensor.shape:
            return False
        self.stored[number] = tensor
        return True

    def stand(self, number: int, tensor: Array) -> None:
        """Lets a value be `tensor`, in place of its buffer if it has one."""
        self._assembled.clear()
        self.stored[number] = tensor

    def own_deltas(self) -> Array:
        """delta of all of this rank's own rows, (batch, heads, local tokens), in one pass."""
        if self._deltas is None:
            dout, out = self.own[Tensor.DO], self.own[Tensor.O]
            self._deltas = torch.empty(dout.shape[:3], dtype=torch.float32, device=dout.device)
            row_dots(dout, out, self._deltas)
            if Tensor.DELTA in self.own:
                self._deltas.sub_(self.own[Tensor.DELTA])
        return self._deltas

    def drop(self, number: int) -> None:
        """Forgets a value that nothing reads any more."""
        self._assembled.clear()
        self.stored.pop(number, None)

    def assemble(
        self, numbers: tuple[int, ...], tensor: Tensor, chunk: int, heads: tuple[int, int]
    ) -> Array:
        """All rows of a chunk for some heads: a view where one value holds them, else joined."""
        key = (numbers, tensor, chunk, heads)
        found = self._assembled.get(key)
        if found is None:
            found = self._assembled[key] = self._assemble(numbers, tensor, chunk, heads)
        return found

    def stands(
        self, numbers: tuple[int, ...], tensor: Tensor, chunk: int, heads: tuple[int, int]
    ) -> bool:
        """Whether `assemble` would copy nothing: one value holds it all, or none is among them."""
        values = [self.values[n] for n in numbers]
        some = [v for v in values if v.tensor is tensor and v.chunk == chunk]
        if not some:
            return True
        layout = self.kv_layout if tensor.by_key else self.q_layout
        wanted = Value(tensor, chunk, 0, len(layout.chunks[chunk]), *heads, rank=-1)
        return any(v.contains(wanted) for v in some)

    def _assemble(
        self, numbers: tuple[int, ...], tensor: Tensor, chunk: int, heads: tuple[int, int]
    ) -> Array:
        layout = self.kv_layout if tensor.by_key else self.q_layout
        wanted = Value(tensor, chunk, 0, len(layout.chunks[chunk]), *heads, rank=-1)
        parts = [
            (self.values[n], n)
            for n in numbers
            if self.values[n].tensor is tensor and self.values[n].chunk == chunk
        ]
        for held, number in parts:
            if held.contains(wanted):
                return part_of(self.get(number), held, wanted)
        first = self.get(parts[0][1])
        whole = first.new_empty((self.batch, wanted.heads, wanted.rows, *first.shape[3:]))
        for held, number in parts:
            copy_overlap(whole, wanted, self.get(number), held)
        return whole

    def own_place(self, number: int) -> Array:
        """The rows of the caller's tensor that a value of this rank stands for."""
        place = self._own.get(number)
        if place is None:
            value = self.values[number]
            layout = self.kv_layout if value.tensor.by_key else self.q_layout
            start = layout.offsets[value.chunk]
            rows = slice(start + value.row_start, start + value.row_stop)
            place = self.own[value.tensor][:, value.head_start : value.head_stop, rows]
            self._own[number] = place
        return place


def copy_overlap(target: Array, to: Value, source: Array, held: Value) -> None:
    """Copies the rows and heads that both values hold."""
    rows = max(to.row_start, held.row_start), min(to.row_stop, held.row_stop)
    heads = max(to.head_start, held.head_start), min(to.head_stop, held.head_stop)
    if rows[0] >= rows[1] or heads[0] >= heads[1]:
        return
    target[
        :,
        heads[0] - to.head_start : heads[1] - to.head_start,
        rows[0] - to.row_start : rows[1] - to.row_start,
    ].copy_(
        source[
            :,
            heads[0] - held.head_start : heads[1] - held.head_start,
            rows[0] - held.row_start : rows[1] - held.row_start,
        ]
    )


def is_summed(value: Value) -> bool:
    """Whether partial results of this tensor merge by plain sums."""
    return value.tensor in SUMMED
