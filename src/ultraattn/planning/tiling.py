"""Turns a tiling problem into an assignment of blocks to ranks, with its bound and its proof."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from ultraattn.enums import StrEnum
from ultraattn.errors import InputError, MissingExtraError
from ultraattn.planning.bounds import lower_bound
from ultraattn.planning.ledger import (
    NO_RANK,
    Ints,
    Ledger,
    TilingProblem,
    Value,
    check_assignment,
    evaluate,
)
from ultraattn.planning.packing import feasible_cap, pack
from ultraattn.planning.repair import repair
from ultraattn.planning.starts import Start, structured


class Effort(StrEnum):
    """How hard to search: in steps, never in seconds."""

    INSTANT = "instant"
    FAST = "fast"
    NORMAL = "normal"
    BEST = "best"


@dataclass(frozen=True)
class Steps:
    """What an effort spends: proposals of the local search, deterministic time of the solver."""

    proposals: int
    restarts: int
    solver_time: float
    solver_blocks: int


STEPS = {
    Effort.INSTANT: Steps(0, 0, 0.0, 0),
    Effort.FAST: Steps(100_000, 1, 0.0, 0),
    Effort.NORMAL: Steps(600_000, 2, 0.4, 150),
    Effort.BEST: Steps(8_000_000, 8, 20.0, 600),
}


@dataclass(frozen=True, eq=False)
class TilingResult:
    """An assignment, what it costs, and how far it can be from the best.

    Attributes:
        assignment: rank of every block, int64 (G, Pq, Pk), -1 where there is no block.
        max_volume, total, max_load: the objective, in the problem's sizes and weights.
        lower_bound: no assignment within the cap has a smaller `max_volume`.
        proved: whether `max_volume` equals `lower_bound`.
        cap_raised_to: the cap used where the given one is infeasible, else None.
        origin: the structured start, or the search, that the assignment comes from.
    """

    assignment: Ints
    max_volume: int
    total: int
    max_load: int
    lower_bound: int
    proved: bool
    cap_raised_to: int | None
    origin: str
    ledger: Ledger

    @property
    def gap(self) -> Fraction:
        """(max_volume - lower_bound) / max_volume; 0 where nothing moves."""
        if self.max_volume == 0:
            return Fraction(0)
        return Fraction(self.max_volume - self.lower_bound, self.max_volume)

    @property
    def value(self) -> Value:
        """The lexicographic objective."""
        return self.max_volume, self.total, self.max_load


@dataclass(frozen=True, eq=False)
class _Found:
    value: Value
    assignment: Ints
    origin: str


def pin_diagonal_blocks(problem: TilingProblem) -> Ints:
    """The owner of the query chunk for blocks (g, i, i), -1 for all others, in block order."""
    block = problem.blocks
    return np.where(block[:, 1] == block[:, 2], problem.q_owner[block[:, 1]], NO_RANK)


def require_solver(effort: Effort) -> None:
    """Raises MissingExtraError where an effort needs OR-Tools and it is not installed."""
    if STEPS[effort].solver_blocks:
        try:
            import ortools  # noqa: F401
        except ImportError as error:
            raise MissingExtraError(
                f"effort '{effort}' proves plans with OR-Tools, which is not installed: "
                "pip install 'ultraattn[plan]', or use effort 'fast'"
            ) from error


def _within_cap(problem: TilingProblem, pinned: Ints, strict: bool) -> TilingProblem:
    """The problem under a cap that can be packed, raised in steps of the smallest block."""
    cap = feasible_cap(problem, pinned)
    if cap > problem.cap and strict:
        heaviest = int(problem.block_weight.max())
        why = (
            f"below the heaviest block ({heaviest})"
            if problem.cap < heaviest
            else "infeasible: the blocks do not fit"
        )
        raise InputError(
            f"load cap {problem.cap} on {problem.ranks} ranks is {why}; the least feasible cap "
            f"found is {cap}: pass that or more, or let the planner raise it"
        )
    return problem if cap == problem.cap else problem.with_cap(cap)


def _pin(problem: TilingProblem, assignment: Ints, pinned: Ints) -> Ints:
    ranks = assignment[problem.weight > 0]
    return problem.spread(np.where(pinned != NO_RANK, pinned, ranks))


def _starts(problem: TilingProblem, pinned: Ints, repairs: int) -> list[_Found]:
    """Structured assignments within the cap, some of them after repair, the best first."""
    found: list[_Found] = []
    over: list[_Found] = []
    seen: set[bytes] = set()
    for start in structured(problem):
        assignment = _pin(problem, start.assignment, pinned)
        if assignment.tobytes() in seen:
            continue
        seen.add(assignment.tobytes())
        ledger = evaluate(problem, assignment)
        kept = found if ledger.max_load <= problem.cap else over
        kept.append(_Found(ledger.value, assignment, start.name))
    over.sort(key=lambda s: (s.value[0] * s.value[2], s.value))
    for uneven in over[:repairs]:
        fixed = repair(problem, uneven.assignment, pinned)
        if fixed is not None:
            name = f"{uneven.origin}, levelled"
            found.append(_Found(evaluate(problem, fixed).value, fixed, name))
    if not found:
        packed = pack(problem, problem.cap, pinned)
        assert packed is not None
        assignment = problem.spread(packed)
        found.append(_Found(evaluate(problem, assignment).value, assignment, "packing"))
    return sorted(found, key=lambda start: start.value)


def solve(
    problem: TilingProblem,
    effort: Effort = Effort.NORMAL,
    *,
    pin_diagonal: bool = False,
    strict_cap: bool = False,
    starts: tuple[Start, ...] = (),
) -> TilingResult:
    """Assigns every block to a rank within the load cap (design, Assignment).

    Minimises, in this order, the largest send or receive of a rank, the total traffic and the
    largest load. The same problem and effort give the same assignment on every machine.

    Args:
        problem: blocks, owners, sizes and cap.
        effort: `instant` and `fast` never call the solver; `normal` and `best` need OR-Tools.
        pin_diagonal: keep blocks (g, i, i) on the owner of query chunk i.
        strict_cap: refuse an infeasible cap instead of raising it.
        starts: further assignments to start from; never worse than the best of them within the cap.

    Raises:
        InputError: the cap is infeasible and `strict_cap` is set; a start that is no assignment.
        MissingExtraError: OR-Tools is missing at `normal` or `best`.
    """
    effort = Effort(effort)
    require_solver(effort)
    for start in starts:
        check_assignment(problem, start.assignment)
    count = len(problem.blocks)
    pinned = (
        pin_diagonal_blocks(problem) if pin_diagonal else np.full(count, NO_RANK, dtype=np.int64)
    )
    asked = problem.cap
    problem = _within_cap(problem, pinned, strict_cap)
    bound = lower_bound(problem)
    found = _starts(problem, pinned, repairs=2)
    best = found[0]
    steps = STEPS[effort]
    if steps.proposals and best.value[0] > bound:
        best = _search(problem, pinned, found, bound, steps)
    return _result(problem, best, bound, asked)


def _search(
    problem: TilingProblem, pinned: Ints, found: list[_Found], bound: int, steps: Steps
) -> _Found:
    from ultraattn.planning.search import Arena, Heat, anneal

    arena = Arena.make(problem, (pinned != NO_RANK).astype(np.int64))
    best = found[0]
    blocks = problem.weight > 0
    kept = (best.value, best.assignment[blocks])
    heat = Heat(50, max(1, steps.proposals // steps.restarts // 50), 50, 10)
    for number in range(steps.restarts):
        start = found[number % len(found)]
        better = anneal(arena, start.assignment[blocks], heat, seed=number, lower=bound, best=kept)
        kept = better or kept
    if kept[0] == best.value:
        return best
    return _Found(kept[0], problem.spread(kept[1]), "search")


def _result(problem: TilingProblem, best: _Found, bound: int, asked: int) -> TilingResult:
    ledger = evaluate(problem, best.assignment)
    return TilingResult(
        assignment=best.assignment,
        max_volume=ledger.max_volume,
        total=ledger.total,
        max_load=ledger.max_load,
        lower_bound=bound,
        proved=ledger.max_volume == bound,
        cap_raised_to=problem.cap if problem.cap != asked else None,
        origin=best.origin,
        ledger=ledger,
    )
