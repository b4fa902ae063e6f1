"""Turns the blocks of a pass into a tiling problem: what rows and columns weigh, and the cap.

In the product sizes are bytes of the real shapes and weights are visible pairs times heads. In
the paper's units one chunk with all heads is 1 (a head range counts its share), forward Q 1, KV 2,
partial O 1, backward Q + dO 2, KV 2, dQ 1, dK + dV 2, and a full block weighs 1 (design, Public
names). Both are integers here: `SizedProblem.unit` says how many make one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import numpy as np

from ultraattn.chunks import Ints
from ultraattn.enums import StrEnum
from ultraattn.errors import InputError
from ultraattn.planning.ledger import TilingProblem
from ultraattn.plans.check import Pass
from ultraattn.plans.head_ranges import HeadRange
from ultraattn.plans.layout import Layout
from ultraattn.plans.problem import Problem
from ultraattn.plans.program import Block
from ultraattn.plans.tensors import Tensor


class Units(StrEnum):
    """In what sizes, bounds and proofs are stated."""

    BYTES = "bytes"
    PAPER = "paper"


MOVED_IN = {
    Pass.FORWARD: ((Tensor.Q,), (Tensor.K, Tensor.V)),
    Pass.BACKWARD: ((Tensor.Q, Tensor.DO, Tensor.LSE, Tensor.DELTA), (Tensor.K, Tensor.V)),
}
"""What travels to a rank that needs a row, and a column (design, Ledger)."""

MOVED_OUT = {
    Pass.FORWARD: ((Tensor.O, Tensor.LSE), ()),
    Pass.BACKWARD: ((Tensor.DQ,), (Tensor.DK, Tensor.DV)),
}
"""What travels back from it."""

PAPER_SIZES = {
    Pass.FORWARD: ((1, 2), (1, 0)),
    Pass.BACKWARD: ((2, 2), (1, 2)),
}
"""((row_in, col_in), (row_out, col_out)) in the paper's units."""


@dataclass(frozen=True, eq=False)
class SizedProblem:
    """A tiling problem, and what its integers mean."""

    tiling: TilingProblem
    unit: int
    """Integers of `tiling` sizes that make one byte, or one of the paper's units."""
    cell_of: Ints
    """For each block, its flat index in ``tiling.weight``: blocks that differ by head share one."""


def sized_problem(
    pass_: Pass,
    problem: Problem,
    q_layout: Layout,
    kv_layout: Layout,
    blocks: Sequence[Block],
    ranges: Sequence[HeadRange],
    *,
    units: Units = Units.BYTES,
    nominal: tuple[Ints, int] | None = None,
    load_cap: float | None = None,
    eta: Fraction = Fraction(1, 20),
) -> SizedProblem:
    """The assignment problem of one pass (design, Ledger and Assignment).

    Args:
        pass_: forward or backward.
        problem: shapes and dtype.
        q_layout: chunks and owners of queries.
        kv_layout: chunks and owners of keys.
        blocks: the visible blocks, none across two ranges.
        ranges: head ranges, ascending.
        units: bytes, or the paper's.
        nominal: a mask's nominal weights and their denominator; needed by the paper's units.
        load_cap: the largest load over the mean, or in full blocks with the paper's units; unless
            given, ``1 + eta``, or ``ceil(W / N)``.
        eta: the imbalance allowed where no cap is given.
    """
    paper = units is Units.PAPER
    cell_of, weight = _weights(q_layout, kv_layout, blocks, ranges)
    if paper:
        if nominal is None:
            raise InputError(
                "units 'paper' need a mask with a grid of its own (full, causal, strided, "
                "global_local, star, streaming, from_blocks), in chunks of equal length; "
                "use units 'bytes'"
            )
        weight = _nominal_weights(weight, nominal, ranges)
    ranks = q_layout.ranks
    full = nominal[1] * problem.heads if paper and nominal else 1
    cap = _cap(int(weight.sum()), ranks, full, load_cap, eta, paper)
    segments, cuts = _segments(problem, ranges)
    q_heads = np.array([stop - start for start, stop in ranges], dtype=np.int64)
    kv_heads = np.array([b - a for a, b in pairwise(cuts)], dtype=np.int64)
    if paper:
        # One chunk with all heads is `unit` integers; a range or a segment counts its share.
        unit = problem.heads * problem.kv_heads
        (row_in, col_in), (row_out, col_out) = PAPER_SIZES[pass_]
        rows = np.where(q_layout.chunks.sizes() > 0, problem.kv_heads, 0)
        columns = np.where(kv_layout.chunks.sizes() > 0, problem.heads, 0)
    else:
        unit = 1
        (row_in, col_in), (row_out, col_out) = (
            tuple(sum(problem.widths.row_bytes(t) for t in group) for group in moved[pass_])
            for moved in (MOVED_IN, MOVED_OUT)
        )
        rows, columns = q_layout.chunks.sizes(), kv_layout.chunks.sizes()
    tiling = TilingProblem(
        ranks=ranks,
        weight=weight,
        q_owner=np.array(q_layout.owners, dtype=np.int64),
        kv_owner=np.array(kv_layout.owners, dtype=np.int64),
        row_in=q_heads[:, None] * rows * row_in,
        row_out=q_heads[:, None] * rows * row_out,
        # The paper counts K and V together: col 2 is one chunk of each.
        col_in=kv_heads[:, None] * columns * col_in,
        col_out=kv_heads[:, None] * columns * col_out,
        segments=segments,
        cap=cap,
    )
    return SizedProblem(tiling, unit, cell_of)


def _weights(
    q_layout: Layout, kv_layout: Layout, blocks: Sequence[Block], ranges: Sequence[HeadRange]
) -> tuple[Ints, Ints]:
    shape = (len(ranges), len(q_layout.chunks), len(kv_layout.chunks))
    range_of = np.zeros(max(stop for _, stop in ranges), dtype=np.int64)
    for index, (start, stop) in enumerate(ranges):
        range_of[start:stop] = index
    columns = [(b.q_chunk, b.kv_chunk, b.head_start, b.weight) for b in blocks]
    q, kv, first, pairs = np.array(columns, dtype=np.int64).reshape(-1, 4).T
    cell_of = np.ravel_multi_index((range_of[first], q, kv), shape)
    weight = np.zeros(shape, dtype=np.int64)
    np.add.at(weight.reshape(-1), cell_of, pairs)
    return cell_of.astype(np.int64), weight


def _nominal_weights(weight: Ints, nominal: tuple[Ints, int], ranges: Sequence[HeadRange]) -> Ints:
    """A full block of all heads weighs ``denominator * heads``; a visible block at least 1."""
    heads = np.array([stop - start for start, stop in ranges], dtype=np.int64)
    table = heads[:, None, None] * nominal[0][None]
    return np.where(weight > 0, np.maximum(table, 1), 0)


def _cap(
    total: int, ranks: int, full: int, load_cap: float | None, eta: Fraction, paper: bool
) -> int:
    if load_cap is not None and not load_cap > 0:
        raise InputError(f"load_cap {load_cap}: expected a number above 0")
    mean = Fraction(total, ranks)
    if paper:
        blocks = -(-mean // full) if load_cap is None else Fraction(str(load_cap))
        return int(blocks * full // 1)
    ratio = 1 + eta if load_cap is None else Fraction(str(load_cap))
    return int(-(-mean * ratio // 1))


def _segments(
    problem: Problem, ranges: Sequence[HeadRange]
) -> tuple[tuple[tuple[int, ...], ...], list[int]]:
    """The kv segments that each head range reads, and the segments' edges in kv heads."""
    spans = [problem.kv_range(*span) for span in ranges]
    cuts = sorted({cut for span in spans for cut in span})
    index = {cut: i for i, cut in enumerate(cuts)}
    return tuple(tuple(range(index[a], index[b])) for a, b in spans), cuts
