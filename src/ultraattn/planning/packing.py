"""Turns block weights and a load cap into a placement within it, or the least cap that has one."""

from __future__ import annotations

import heapq

import numpy as np

from ultraattn.planning.ledger import NO_RANK, Ints, TilingProblem


def _lightest_first(weight: Ints, load: list[int], todo: list[int], placed: Ints) -> int:
    """Heaviest block to the lightest rank (Graham's LPT); returns the largest load."""
    heap = [(value, rank) for rank, value in enumerate(load)]
    heapq.heapify(heap)
    for block in todo:
        value, rank = heap[0]
        placed[block] = rank
        heapq.heapreplace(heap, (value + int(weight[block]), rank))
    return max(value for value, _ in heap)


def _best_fit(weight: Ints, load: list[int], todo: list[int], placed: Ints, cap: int) -> bool:
    """Heaviest block to the fullest rank that still has room; whether all found room."""
    room = np.array([cap - value for value in load], dtype=np.int64)
    for block in todo:
        left = room - int(weight[block])
        fits = np.flatnonzero(left >= 0)
        if not fits.size:
            return False
        rank = fits[int(np.argmin(left[fits]))]
        placed[block] = rank
        room[rank] = left[rank]
    return True


def pack(problem: TilingProblem, cap: int, pinned: Ints | None = None) -> Ints | None:
    """Ranks of all blocks (in their order) with loads of at most `cap`, or None if none was found.

    `pinned`: the rank of every block that is fixed, -1 for the others.
    """
    weight = problem.block_weight
    placed = np.full(len(weight), NO_RANK, dtype=np.int64) if pinned is None else pinned.copy()
    load = [int(weight[placed == rank].sum()) for rank in range(problem.ranks)]
    if max(load) > cap:
        return None
    free = np.flatnonzero(placed == NO_RANK)
    todo = free[np.argsort(-weight[free], kind="stable")].tolist()
    if _lightest_first(weight, load, todo, placed) <= cap:
        return placed
    return placed if _best_fit(weight, load, todo, placed, cap) else None


def feasible_cap(problem: TilingProblem, pinned: Ints | None = None) -> int:
    """The problem's cap, or the first above it, in steps of the smallest block, that can be packed.

    A cap below the heaviest block or below the mean load is raised to it first.
    """
    weight = problem.block_weight
    if not len(weight):
        return problem.cap
    step = int(weight.min())
    floor = max(int(weight.max()), -(-problem.total_weight // problem.ranks))
    cap = problem.cap
    if cap < floor:
        cap += -(-(floor - cap) // step) * step
    while pack(problem, cap, pinned) is None:
        cap += step
    return cap
