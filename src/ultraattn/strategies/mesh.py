"""Turns blocks into ranks by tiles of an r x c mesh: a row group's queries, a column's keys.

Rank (a, b) = a c + b computes the blocks of row group a (the queries of ranks a c .. a c + c - 1)
and column group b (the keys of ranks b, c + b, 2 c + b, ...): queries travel along mesh rows, keys
along mesh columns, partial results back along rows. A full mask on P = k N chunks moves, in the
paper's units, 2 k (r + c - 2) past each rank, where rows alone move 2 k (N - 1).
"""

from __future__ import annotations

from collections.abc import Sequence

from ultraattn.errors import InputError
from ultraattn.plans.check import Pass
from ultraattn.plans.layout import Layout
from ultraattn.plans.problem import Problem
from ultraattn.plans.program import Block, Program


def mesh_ranks(
    blocks: Sequence[Block], q_layout: Layout, kv_layout: Layout, shape: tuple[int, int]
) -> list[int]:
    """The rank of each block on an ``(r, c)`` mesh."""
    r, c = shape
    if r * c != q_layout.ranks:
        raise InputError(
            f"strategy mesh {r} x {c} over {q_layout.ranks} ranks: the product of both must be the "
            "number of ranks"
        )
    q_owners, kv_owners = q_layout.owners, kv_layout.owners
    return [q_owners[b.q_chunk] // c * c + kv_owners[b.kv_chunk] % c for b in blocks]


def mesh(
    pass_: Pass,
    problem: Problem,
    q_layout: Layout,
    kv_layout: Layout,
    nodes: Sequence[int],
    blocks: Sequence[Block],
    shape: tuple[int, int],
) -> Program:
    """Tiles of an ``(r, c)`` mesh, by direct transfers of what each tile needs."""
    # The planner imports the strategies; only a call needs the planner's graph.
    from ultraattn.planning.graph import build_program

    assigned = mesh_ranks(blocks, q_layout, kv_layout, shape)
    return build_program(pass_, problem, q_layout, kv_layout, nodes, blocks, assigned)
