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
from ultraattn.planning.packing import feasible_cap
from ultraattn.planning.starts import Found, Start, structured_starts


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
    proposals_per_block: int
    width: int
    rounds: int
    solver_time: float
    solver_size: int
    refute_time: float = 0.0
    """Where the bound is one step below: to ask whether that step can be taken at all."""
    refute_size: int = 0
    levelled: int = 4
    """Structured starts that are levelled with many ranks, where each takes long."""


FEW_RANKS, MANY_RANKS, MANY_BLOCKS = 8, 32, 8_000

STEPS = {
    Effort.INSTANT: Steps(0, 0, 0, 0, 0.0, 0),
    Effort.FAST: Steps(130_000, 3_000, 2, 1, 0.0, 0, levelled=2),
    Effort.NORMAL: Steps(4_400_000, 64_000, 4, 1, 0.4, 600, levelled=1),
    Effort.BEST: Steps(50_000_000, 500_000, 4, 4, 10.0, 6_000, 60.0, 600),
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


def pin_diagonal_blocks(problem: TilingProblem) -> Ints:
    """The owner of the query chunk for blocks (g, i, i), -1 for all others, in block order."""
    block = problem.blocks
    return np.where(block[:, 1] == block[:, 2], problem.q_owner[block[:, 1]], NO_RANK)


def require_solver(effort: Effort) -> None:
    """Raises MissingExtraError where an effort needs OR-Tools and it is not installed."""
    if STEPS[effort].solver_size:
        try:
            import ortools  # noqa: F401
        except ImportError as error:
            raise MissingExtraError(
                f"effort '{effort}' proves plans with OR-Tools, which is not installed: "
                "pip install 'ultraattn[plan]', or use effort 'fast'"
            ) from error


def within_cap(problem: TilingProblem, pinned: Ints, strict: bool) -> TilingProblem:
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
    problem = within_cap(problem, pinned, strict_cap)
    steps = STEPS[effort]
    repairs = steps.levelled if problem.ranks >= MANY_RANKS else 4
    found = structured_starts(problem, pinned, repairs, further=starts)
    best = found[0]
    bound = lower_bound(problem, best.value[0])
    provable = count * problem.ranks <= steps.solver_size
    if steps.proposals and best.value[0] > bound:
        from ultraattn.planning.improve import improve

        most = steps.proposals
        if problem.ranks <= FEW_RANKS and not provable:
            most = most * 6 // 5  # a proposal takes less, and no proof follows
        elif count > MANY_BLOCKS:
            most //= 3  # a proposal takes more, and so does all else
        proposals = min(most, steps.proposals_per_block * count)
        best = improve(problem, pinned, found, bound, proposals, steps.width, steps.rounds)
    if best.value[0] > bound and provable:
        from ultraattn.planning.solver import prove, refuted

        proof = prove(problem, pinned, best.assignment, bound, steps.solver_time)
        bound = proof.lower_bound
        if proof.value < best.value:
            best = Found(proof.value, proof.assignment, "solver")
        less = best.value[0] - problem.size_unit
        near = bound == less and count * problem.ranks <= steps.refute_size
        if near and refuted(problem, pinned, less, steps.refute_time):
            bound = best.value[0]
    return _result(problem, best, bound, asked)


def _result(problem: TilingProblem, best: Found, bound: int, asked: int) -> TilingResult:
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
