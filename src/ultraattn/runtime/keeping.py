"""Keeps what a rank received in forward until its backward reads it: one flat tensor a call.

    forward                                       backward
    a receive arrives ──► copied to its place     values of the plan that nothing writes
    in the flat tensor, which autograd saves ───► are views of the flat tensor

Each call has a tensor of its own, so that two forwards may come before a backward, and a captured
graph treats it like any result.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor as Array

from ultraattn.plans.kept import Kept
from ultraattn.plans.program import Value
from ultraattn.plans.tensors import Widths
from ultraattn.runtime.copies import copy
from ultraattn.runtime.pieces import Pieces, part_of, typed, value_bytes


@dataclass(frozen=True)
class Keeping:
    """Where each kept value stands in the flat tensor of one rank."""

    numbers: tuple[int, ...]
    """Values of backward."""
    values: tuple[Value, ...]
    edges: tuple[int, ...]
    """Value i stands in bytes [edges[i], edges[i + 1]) of one batch entry."""
    by_source: dict[int, tuple[int, ...]]
    """For each value of forward that is kept, in whole or in part, the indices of its parts."""
    widths: Widths

    @staticmethod
    def of(kept: Kept, widths: Widths) -> Keeping:
        """The places of what a plan says that a rank keeps."""
        sizes = (value_bytes(value, widths, 1) for value in kept.values)
        by_source: dict[int, tuple[int, ...]] = defaultdict(tuple)
        for index, source in enumerate(kept.sources):
            by_source[source] += (index,)
        edges = tuple(accumulate(sizes, initial=0))
        return Keeping(kept.numbers, kept.values, edges, dict(by_source), widths)

    @property
    def bytes(self) -> int:
        """Bytes of all, for one batch entry."""
        return self.edges[-1]

    def empty(self, like: Array, batch: int) -> Array:
        """A flat tensor that holds all of a call, of the dtype and on the device of `like`."""
        return like.new_empty(batch * self.bytes // like.element_size())

    def fill(self, flat: Array, arrived: Iterable[int], pieces: Pieces) -> None:
        """Copies what is kept of values of forward that just arrived."""
        for number in arrived:
            for index in self.by_source.get(number, ()):
                held, wanted = pieces.values[number], self.values[index]
                place = self._place(flat, index, pieces.batch)
                copy(place, part_of(pieces.get(number), held, wanted))

    def views(self, flat: Array, batch: int) -> Iterator[tuple[int, Array]]:
        """Each kept value of backward and the tensor that it is."""
        for index, number in enumerate(self.numbers):
            yield number, self._place(flat, index, batch)

    def _place(self, flat: Array, index: int, batch: int) -> Array:
        a, b = self.edges[index : index + 2]
        buffer = flat.view(torch.uint8)[a * batch : b * batch]
        return typed(buffer, self.values[index], self.widths, batch)
