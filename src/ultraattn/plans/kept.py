"""Says which inputs of backward a rank holds already, since it received them in forward.

A value of backward that no task writes stands on a rank before the pass begins. Either its rank
owns it, or it is *kept*: forward of the same plan brought it there, alone or as a part of more.

    forward     rank 0 ── k,v of chunk 0, heads 0:8 ──> rank 1
    backward    rank 1 reads k,v of chunk 0, heads 0:4: nothing writes them, nothing is sent
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ultraattn.chunks import Ints
from ultraattn.plans.layout import Layout
from ultraattn.plans.program import TASK_ORDER, Program, TaskKind, Value
from ultraattn.plans.tensors import TENSOR_ORDER, Tensor

KEEPABLE = (Tensor.Q, Tensor.K, Tensor.V)
"""What both passes read."""
_MOVES = [TASK_ORDER.index(kind) for kind in (TaskKind.TRANSFER, TaskKind.COLLECTIVE)]
_BY_KEY = np.array([tensor.by_key for tensor in TENSOR_ORDER])


@dataclass(frozen=True)
class Kept:
    """What one rank keeps of forward for backward."""

    numbers: tuple[int, ...] = ()
    """Values of the backward program, ascending."""
    sources: tuple[int, ...] = ()
    """For each of them the value of the forward program that holds it."""
    values: tuple[Value, ...] = ()
    """What backward reads of each."""


def kept_values(forward: Program, backward: Program, q_layout: Layout, kv_layout: Layout) -> Ints:
    """For each value of backward the value of forward that it is kept from: int64, (values,).

    -1 for values that a task of backward writes, that their rank owns, or that forward did not
    bring to it (which `Plan.check` refuses).
    """
    source = np.full(len(backward.values.rank), -1, dtype=np.int64)
    away = np.flatnonzero(
        _elsewhere(backward, q_layout, kv_layout) & (backward.producer < 0)
    ).tolist()
    if not away:
        return source
    held = received(forward, q_layout, kv_layout)
    values, forward_values = backward.value_views, forward.value_views
    for number in away:
        value = values[number]
        for candidate in held.get((value.rank, value.tensor, value.chunk), ()):
            if forward_values[candidate].holds(value):
                source[number] = candidate
                break
    return source


def received(
    forward: Program, q_layout: Layout, kv_layout: Layout
) -> dict[tuple[int, Tensor, int], list[int]]:
    """The queries, keys and values that messages of forward bring, by (rank, tensor, chunk)."""
    v, producer = forward.values, forward.producer
    came = (producer >= 0) & _elsewhere(forward, q_layout, kv_layout)
    came &= np.isin(v.tensor, [tensor.code for tensor in KEEPABLE])
    came[came] = np.isin(forward.tasks.kind[producer[came]], _MOVES)
    found: dict[tuple[int, Tensor, int], list[int]] = defaultdict(list)
    for number in np.flatnonzero(came).tolist():
        key = int(v.rank[number]), TENSOR_ORDER[v.tensor[number]], int(v.chunk[number])
        found[key].append(number)
    return found


def kept_of(rank: int, sources: Ints, backward: Program) -> Kept:
    """The part of `kept_values` that is of one rank."""
    numbers = np.flatnonzero((sources >= 0) & (backward.values.rank == rank)).tolist()
    return Kept(
        tuple(numbers),
        tuple(sources[numbers].tolist()),
        tuple(backward.value_views[number] for number in numbers),
    )


def _elsewhere(program: Program, q_layout: Layout, kv_layout: Layout) -> npt.NDArray[np.bool_]:
    """Whether a value stands on a rank that does not own its chunk."""
    v = program.values
    by_key = _BY_KEY[v.tensor]
    away = np.zeros(len(by_key), dtype=np.bool_)
    for which, layout in ((by_key, kv_layout), (~by_key, q_layout)):
        owners = np.array(layout.owners, dtype=np.int64)
        away[which] = v.rank[which] != owners[v.chunk[which]]
    return away
