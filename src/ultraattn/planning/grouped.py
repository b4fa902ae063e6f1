"""Turns a problem for many ranks into one for groups of ranks, and its assignments back.

Neighbouring ranks form groups of height x width. A group that needs a row fetches it to `width` of
its ranks, and a column to `height` of them, so rows and columns weigh that much for it. A block of
a group goes to the member whose place in the group's mesh its row and column say.
"""

from __future__ import annotations

import numpy as np

from ultraattn.planning.ledger import NO_RANK, Ints, TilingProblem


def group(problem: TilingProblem, height: int, width: int) -> TilingProblem:
    """The problem of groups of ``height * width`` ranks; a group's cap is that of all its ranks."""
    size = height * width
    return TilingProblem(
        ranks=problem.ranks // size,
        weight=problem.weight,
        q_owner=problem.q_owner // size,
        kv_owner=problem.kv_owner // size,
        row_in=problem.row_in * width,
        row_out=problem.row_out * width,
        col_in=problem.col_in * height,
        col_out=problem.col_out * height,
        segments=problem.segments,
        cap=problem.cap * size,
    )


def ungroup(problem: TilingProblem, height: int, width: int, groups: Ints) -> Ints:
    """The assignment to ranks of an assignment to groups; loads within a group may be uneven."""
    size = height * width
    row = problem.q_owner % size // width
    column = problem.kv_owner % width
    member = row[None, :, None] * width + column[None, None, :]
    return np.where(groups >= 0, groups * size + member, NO_RANK)
