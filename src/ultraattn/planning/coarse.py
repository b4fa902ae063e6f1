"""Turns a fine problem into a coarser one of neighbouring chunks, and its assignments back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ultraattn.planning.ledger import NO_RANK, Ints, TilingProblem


@dataclass(frozen=True, eq=False)
class Coarse:
    """A coarser problem, and the coarse chunk of every fine query and key chunk."""

    problem: TilingProblem
    row_of: Ints
    column_of: Ints


def _groups(owner: Ints, factor: int) -> Ints | None:
    """The group of every chunk when each run of one owner is cut in groups of `factor`, or None."""
    if not owner.size:
        return None
    cuts = np.flatnonzero(np.diff(owner)) + 1
    runs = np.diff(np.concatenate([[0], cuts, [owner.size]]))
    if (runs % factor).any():
        return None
    return np.arange(owner.size, dtype=np.int64) // factor


def _sum(values: Ints, groups: Ints) -> Ints:
    """Sums along the last axis by group."""
    cuts = np.flatnonzero(np.diff(groups, prepend=-1))
    return np.add.reduceat(values, cuts, axis=-1)


def coarsen(problem: TilingProblem) -> Coarse | None:
    """Joins neighbouring chunks of one owner, or None where the runs of owners do not allow it.

    Weights and sizes add up, so an assignment lifted back has the same loads and at most the
    volume it has here: the cap stays as it is.
    """
    for factor in (2, 3, 5, 7):
        row_of, column_of = _groups(problem.q_owner, factor), _groups(problem.kv_owner, factor)
        if row_of is not None and column_of is not None:
            break
    else:
        return None
    weight = _sum(_sum(problem.weight, column_of).swapaxes(1, 2), row_of).swapaxes(1, 2)
    coarse = TilingProblem(
        ranks=problem.ranks,
        weight=np.ascontiguousarray(weight),
        q_owner=problem.q_owner[np.flatnonzero(np.diff(row_of, prepend=-1))],
        kv_owner=problem.kv_owner[np.flatnonzero(np.diff(column_of, prepend=-1))],
        row_in=_sum(problem.row_in, row_of),
        row_out=_sum(problem.row_out, row_of),
        col_in=_sum(problem.col_in, column_of),
        col_out=_sum(problem.col_out, column_of),
        segments=problem.segments,
        cap=problem.cap,
        node=problem.node,
    )
    return Coarse(coarse, row_of, column_of)


def lift(fine: TilingProblem, coarse: Coarse, assignment: Ints) -> Ints:
    """The fine assignment where every block is where its coarse block is."""
    spread = assignment[:, coarse.row_of][:, :, coarse.column_of]
    return np.where(fine.weight > 0, spread, NO_RANK)
