"""Turns starting assignments into one good one: which annealings run, from what, in which order.

A search is rounds of two stages. The first anneals several starts, each in its own style; the
second anneals the best outcomes again, from a low heat. Runs of a stage do not see each other, so
they share the cores without changing the outcome. Fine grids are first solved coarse (`coarse`) and
then only annealed from a low heat, many ranks first as groups of ranks (`grouped`). A run that ends
over the cap is levelled (`repair`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from ultraattn.planning import moves
from ultraattn.planning.coarse import coarsen, lift
from ultraattn.planning.components import assemble, components
from ultraattn.planning.grouped import group, ungroup
from ultraattn.planning.ledger import NO_RANK, Ints, TilingProblem, Value, evaluate
from ultraattn.planning.repair import repair
from ultraattn.planning.search import Arena, Style, anneal
from ultraattn.planning.starts import Found, structured_starts

Given = TypeVar("Given")
Result = TypeVar("Result")

# Groups of ranks (height, width), where many ranks are planned as groups first.
GROUPS = ((2, 4), (4, 2), (4, 4), (2, 2))
MANY_RANKS = 32
# With more blocks a rank a grid is mainly solved coarse; in between half of the search is.
FINE_BLOCKS, MIDDLE_BLOCKS = 36, 15
HALF_COARSE_RANKS = 16
ROUNDS = 64

# Volumes that are pressed only below the best known stay near it (COOL): it finds the least volume
# of few ranks, and of many where a few must be busy. BALANCE evens all volumes out instead (squares
# over the mean), and ends lower where many ranks are alike: a short run of each tells which.
FREE = Style(hot=120, cold=30, hard=6, heavy=3, soft=0, lines=8)
PLAY = Style(hot=60, cold=30, hard=3, heavy=3, soft=0, lines=8)
COOL = Style(hot=40, cold=8, hard=6, heavy=3, soft=0, lines=12)
EVEN = Style(hot=50, cold=8, hard=6, heavy=3, soft=1, lines=16)
CALM = Style(hot=20, cold=6, hard=6, heavy=3, soft=1, lines=8)
BALANCE = Style(hot=100, cold=12, hard=0, heavy=3, soft=1, square=2, lines=8)
SETTLE = Style(hot=40, cold=8, hard=0, heavy=3, soft=1, square=2, lines=4)

# Styles of the runs of both stages, with few ranks and with many.
HOT: tuple[Style, ...] = (COOL, EVEN, COOL, FREE)
THEN = (COOL, PLAY, CALM, COOL)
TRIED_MANY, THEN_MANY = (BALANCE, COOL), (COOL, SETTLE)


@dataclass(frozen=True, eq=False)
class Run:
    """One annealing to do: from where, and how."""

    start: Found
    style: Style
    seed: int


@dataclass(frozen=True, eq=False)
class Level:
    """A problem with what all of its runs share."""

    problem: TilingProblem
    pinned: Ints
    bound: int
    arena: Arena

    @staticmethod
    def make(problem: TilingProblem, pinned: Ints, bound: int) -> Level:
        """Lays out the arrays of the inner loop once."""
        arena = Arena.make(problem, (pinned != NO_RANK).astype(np.int64))
        return Level(problem, pinned, bound, arena)


def _found(level: Level, assignment: Ints) -> Found:
    return Found(evaluate(level.problem, assignment).value, assignment, "search")


def _spread(level: Level, value: Value, ranks: Ints) -> Found:
    return Found(value, level.problem.spread(ranks), "search")


def _run(level: Level, run: Run, proposals: int) -> Found:
    """The better of the run's start and what it finds; an end over the cap is levelled."""
    ranks = run.start.assignment[level.problem.weight > 0]
    found = anneal(
        level.arena,
        ranks,
        run.style,
        ROUNDS,
        max(1, proposals // ROUNDS),
        seed=run.seed,
        lower=level.bound,
        best=(run.start.value, ranks),
    )
    best = run.start
    if found.value != best.value:
        best = _spread(level, found.value, found.ranks)
    fixed = repair(level.problem, level.problem.spread(found.last), level.pinned)
    if fixed is not None:
        best = min(best, _found(level, fixed), key=lambda f: f.value)
    return best


def _together(work: Callable[[Given], Result], given: Sequence[Given]) -> list[Result]:
    """Results in the order of `given`, on as many threads as there are cores."""
    cores = os.cpu_count() or 1
    if len(given) < 2 or cores < 2 or not moves.COMPILED:
        return [work(one) for one in given]
    with ThreadPoolExecutor(min(cores, len(given))) as pool:
        return list(pool.map(work, given))


def _distinct(found: Sequence[Found]) -> list[Found]:
    """The best first, without repeats."""
    kept: list[Found] = []
    for one in sorted(found, key=lambda f: f.value):
        if not any(np.array_equal(one.assignment, other.assignment) for other in kept):
            kept.append(one)
    return kept


def _stages(level: Level, starts: Sequence[Found], proposals: int, width: int, seed: int) -> Found:
    """One round: `width` runs from the starts, then `width` runs from the best outcomes.

    With many ranks a short run in each of two styles comes before, and then twice as many runs in
    the style of the better one.
    """
    styles, share, count, left = HOT, proposals // 2, width, proposals // 2
    starts = _distinct(starts)
    if level.problem.ranks >= MANY_RANKS:
        runs = [Run(starts[0], style, seed + k) for k, style in enumerate(TRIED_MANY)]
        tried = _together(lambda run: _run(level, run, proposals // 10), runs)
        better = min(range(len(TRIED_MANY)), key=lambda k: tried[k].value)
        starts = _distinct([*starts, *tried])
        styles, share, count = (TRIED_MANY[better],), proposals * 6 // 10, 2 * width
        left = proposals // 5
    runs = [
        Run(starts[k % len(starts)], styles[k % len(styles)], seed + 10 + k) for k in range(count)
    ]
    outcomes = _together(lambda run: _run(level, run, max(1, share // count)), runs)
    best = _distinct([*starts, *outcomes])
    return _again(level, best, left, width, seed + 30)


def _again(level: Level, best: Sequence[Found], proposals: int, width: int, seed: int) -> Found:
    """`width` runs from a low heat: two from the best, two from the next, and so on."""
    if best[0].value[0] <= level.bound:
        return best[0]
    styles = THEN_MANY if level.problem.ranks >= MANY_RANKS else THEN
    runs = [Run(best[k // 2 % len(best)], styles[k % len(styles)], seed + k) for k in range(width)]
    share = max(1, proposals // width)
    return _distinct([best[0], *_together(lambda run: _run(level, run, share), runs)])[0]


def _less_traffic(level: Level, best: Found, proposals: int, seed: int) -> Found:
    """The same volume with less traffic, if a short cold run finds it."""
    ranks = best.assignment[level.problem.weight > 0]
    found = anneal(
        level.arena,
        ranks,
        CALM,
        ROUNDS,
        max(1, proposals // ROUNDS),
        seed=seed,
        lower=level.bound,
        best=(best.value, ranks),
        follow=False,
    )
    return best if found.value == best.value else _spread(level, found.value, found.ranks)


def _grouped_start(
    problem: TilingProblem, pinned: Ints, mesh: tuple[int, int], proposals: int
) -> Found | None:
    """The start that a search over groups of ranks gives, if it can be levelled within the cap."""
    size = mesh[0] * mesh[1]
    if problem.ranks % size or problem.ranks // size < 2:
        return None
    groups = group(problem, *mesh)
    chain = []
    while groups.weight.shape[1] > 2 * groups.ranks:
        coarse = coarsen(groups)
        if coarse is None:
            break
        chain.append((groups, coarse))
        groups = coarse.problem
    free = np.full(len(groups.blocks), NO_RANK, dtype=np.int64)
    starts = structured_starts(groups, free, repairs=2)
    if not starts:
        return None
    best = _run(Level.make(groups, free, 0), Run(starts[0], EVEN, 1), proposals)
    assignment = best.assignment
    for fine, coarse in reversed(chain):
        assignment = lift(fine, coarse, assignment)
    ranks = ungroup(problem, *mesh, assignment)[problem.weight > 0]
    assignment = problem.spread(np.where(pinned != NO_RANK, pinned, ranks))
    fixed = repair(problem, assignment, pinned)
    return fixed if fixed is None else Found(evaluate(problem, fixed).value, fixed, "groups")


def _coarse_start(
    problem: TilingProblem, pinned: Ints, bound: int, proposals: int, width: int, rounds: int
) -> Found | None:
    """The start that a search on a coarser grid gives, if there is one and nothing is pinned."""
    coarse = coarsen(problem)
    if coarse is None or (pinned != NO_RANK).any():
        return None
    small = coarse.problem
    free = np.full(len(small.blocks), NO_RANK, dtype=np.int64)
    starts = structured_starts(small, free, repairs=2)
    if not starts:
        return None
    best = improve(small, free, starts, bound, proposals, width, rounds)
    assignment = lift(problem, coarse, best.assignment)
    return Found(evaluate(problem, assignment).value, assignment, "coarse")


def _component_start(
    problem: TilingProblem, pinned: Ints, bound: int, proposals: int, width: int, rounds: int
) -> Found | None:
    """The start that searches of unconnected groups of ranks give; equal groups share one."""
    parts = components(problem)
    if not parts or (pinned != NO_RANK).any():
        return None
    distinct = {part.key: part for part in parts}
    solved: dict[tuple[object, ...], Ints] = {}
    for key, part in distinct.items():
        small = part.problem
        if not len(small.blocks):
            solved[key] = np.full(small.weight.shape, NO_RANK, dtype=np.int64)
            continue
        free = np.full(len(small.blocks), NO_RANK, dtype=np.int64)
        starts = structured_starts(small, free, repairs=2)
        if not starts:
            return None
        share = proposals // len(distinct)
        solved[key] = improve(small, free, starts, bound, share, width, rounds).assignment
    assignment = assemble(problem, [(part, solved[part.key]) for part in parts])
    return Found(evaluate(problem, assignment).value, assignment, "components")


def improve(
    problem: TilingProblem,
    pinned: Ints,
    starts: Sequence[Found],
    bound: int,
    proposals: int,
    width: int,
    rounds: int,
) -> Found:
    """The best assignment found with about `proposals` proposals, never worse than the starts.

    Args:
        problem: with a cap that can be met.
        pinned: the rank of every block (in their order) that is fixed, -1 for the others.
        starts: assignments within the cap, the best first.
        bound: a lower bound on the volume; the search stops there.
        width: runs of a stage.
        rounds: how often to begin anew; the best of all counts.
    """
    best = min(starts, key=lambda f: f.value)
    if best.value[0] <= bound:
        return best
    if problem.ranks >= MANY_RANKS and rounds == 1:
        width = 2  # fewer, longer runs
    starts = list(starts[:3])
    share = proposals
    density = len(problem.blocks) // problem.ranks
    middle = density > MIDDLE_BLOCKS and problem.ranks >= HALF_COARSE_RANKS
    most = proposals * 5 // 6
    lifted = _component_start(problem, pinned, bound, most, width, rounds)
    if lifted is None and (density > FINE_BLOCKS or middle):
        most = most if density > FINE_BLOCKS else proposals // 2
        lifted = _coarse_start(problem, pinned, bound, most, width, rounds)
    if lifted is not None:
        share = proposals - most
        starts = [lifted]
        best = min(best, lifted, key=lambda f: f.value)
    elif problem.ranks >= MANY_RANKS:
        meshes = GROUPS[: 2 if rounds == 1 else len(GROUPS)]
        groups = _together(
            lambda mesh: _grouped_start(problem, pinned, mesh, proposals // 20), meshes
        )
        starts = _distinct([*starts, *(g for g in groups if g is not None)])[:4]
    level = Level.make(problem, pinned, bound)
    for number in range(rounds):
        if best.value[0] <= bound:
            break
        again = [best, *starts] if number else starts
        if lifted is None:
            found = _stages(level, again, share // rounds, width, 1000 * number)
        else:
            found = _again(level, again, share // rounds, width, 1000 * number)
        best = min(best, found, key=lambda f: f.value)
    return _less_traffic(level, best, share // 10, 999)
