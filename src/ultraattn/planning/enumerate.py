"""Turns a tiny problem into all of its optima, by trying every assignment: the oracle of tests."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from ultraattn.errors import InputError
from ultraattn.planning.ledger import Ints, TilingProblem, evaluate

MOST = 1_000_000


@dataclass(frozen=True, eq=False)
class Optima:
    """Every assignment of least volume within the cap, and the total traffic of each."""

    max_volume: int
    assignments: tuple[Ints, ...]
    totals: tuple[int, ...]


def optima(problem: TilingProblem) -> Optima:
    """All assignments of least volume (design, worked example).

    Raises:
        InputError: more than a million assignments, or none within the cap.
    """
    weight = problem.block_weight.tolist()
    count = problem.ranks ** len(weight)
    if count > MOST:
        raise InputError(
            f"{len(weight)} blocks on {problem.ranks} ranks are {count} assignments: expected at "
            f"most {MOST}; use `solve`"
        )
    least = None
    kept: list[tuple[Ints, int]] = []
    for ranks in itertools.product(range(problem.ranks), repeat=len(weight)):
        load = [0] * problem.ranks
        for rank, work in zip(ranks, weight, strict=True):
            load[rank] += work
        if max(load) > problem.cap:
            continue
        assignment = problem.spread(np.array(ranks, dtype=np.int64))
        ledger = evaluate(problem, assignment)
        if least is None or ledger.max_volume < least:
            least, kept = ledger.max_volume, []
        if ledger.max_volume == least:
            kept.append((assignment, ledger.total))
    if least is None:
        raise InputError(f"no assignment has loads of at most {problem.cap}: raise the cap")
    return Optima(least, tuple(a for a, _ in kept), tuple(t for _, t in kept))
