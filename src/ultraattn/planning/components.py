"""Turns a problem whose ranks fall into groups that share no block into one problem a group.

Strided attention in its remapped order is four squares along the diagonal: four problems, which
are equal, so that one search serves all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ultraattn.planning.ledger import NO_RANK, Ints, TilingProblem


@dataclass(frozen=True, eq=False)
class Component:
    """The problem of some ranks alone, and which ranks, rows and columns those are."""

    problem: TilingProblem
    ranks: Ints
    rows: Ints
    columns: Ints

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for equal problems."""
        p = self.problem
        arrays = (p.weight, p.q_owner, p.kv_owner, p.row_in, p.row_out, p.col_in, p.col_out)
        return (p.ranks, p.cap, *((a.shape, a.tobytes()) for a in arrays))


def components(problem: TilingProblem) -> list[Component]:
    """Groups of ranks that no block connects, where there are several and each can do its work.

    Empty where there is one group only, or where one group has more work than its ranks may do.
    """
    parent = list(range(problem.ranks))

    def root(rank: int) -> int:
        while parent[rank] != rank:
            parent[rank] = parent[parent[rank]]
            rank = parent[rank]
        return rank

    connected = problem.weight.any(axis=0)
    for i, j in np.argwhere(connected).tolist():
        a, b = root(int(problem.q_owner[i])), root(int(problem.kv_owner[j]))
        parent[max(a, b)] = min(a, b)
    group = np.array([root(rank) for rank in range(problem.ranks)], dtype=np.int64)
    found = []
    for first in np.unique(group).tolist():
        ranks = np.flatnonzero(group == first)
        place = np.full(problem.ranks, NO_RANK, dtype=np.int64)
        place[ranks] = np.arange(len(ranks))
        rows = np.flatnonzero(group[problem.q_owner] == first)
        columns = np.flatnonzero(group[problem.kv_owner] == first)
        part = TilingProblem(
            ranks=len(ranks),
            weight=np.ascontiguousarray(problem.weight[:, rows][:, :, columns]),
            q_owner=place[problem.q_owner[rows]],
            kv_owner=place[problem.kv_owner[columns]],
            row_in=np.ascontiguousarray(problem.row_in[:, rows]),
            row_out=np.ascontiguousarray(problem.row_out[:, rows]),
            col_in=np.ascontiguousarray(problem.col_in[:, columns]),
            col_out=np.ascontiguousarray(problem.col_out[:, columns]),
            segments=problem.segments,
            cap=problem.cap,
        )
        if part.total_weight > part.cap * part.ranks:
            return []
        found.append(Component(part, ranks, rows, columns))
    return found if len(found) > 1 else []


def assemble(problem: TilingProblem, parts: list[tuple[Component, Ints]]) -> Ints:
    """The assignment of the whole from those of its components."""
    whole = np.full(problem.weight.shape, NO_RANK, dtype=np.int64)
    for part, assignment in parts:
        ranks = np.where(assignment >= 0, part.ranks[assignment], NO_RANK)
        whole[:, part.rows[:, None], part.columns[None, :]] = ranks
    return whole
