"""Chooses a rank for every block of a pass: the least busiest link that a load cap allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from ultraattn.errors import InputError
from ultraattn.planning.blocks import blocks_of, head_ranges
from ultraattn.planning.ledger import NO_RANK, evaluate
from ultraattn.planning.setting import Setting, nominal_weights
from ultraattn.planning.sizes import SizedProblem, Units, sized_problem
from ultraattn.planning.tiling import Effort, TilingResult, solve
from ultraattn.plans.check import Pass
from ultraattn.plans.plan import Bounds
from ultraattn.plans.program import Block
from ultraattn.strategies import rows

MOST_CELLS = {
    Effort.INSTANT: 16_384,
    Effort.FAST: 32_768,
    Effort.NORMAL: 65_536,
    Effort.BEST: 262_144,
}
"""Cells of all head ranges together, up to which more ranges are tried."""


@dataclass(frozen=True)
class TileOptions:
    """How the tile strategy searches."""

    head_groups: int | None = None
    load_cap: float | None = None
    strict_cap: bool = False
    effort: Effort = Effort.NORMAL
    units: Units = Units.BYTES
    pin_diagonal: bool = False
    eta: Fraction = Fraction(1, 20)


@dataclass(frozen=True, eq=False)
class Assignment:
    """Blocks of one pass and the rank of each."""

    blocks: Sequence[Block]
    ranks: Sequence[int]
    head_groups: int
    bounds: Bounds
    notes: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class _Candidate:
    groups: int
    blocks: Sequence[Block]
    sized: SizedProblem


def assign_tiles(pass_: Pass, made: Setting, options: TileOptions) -> Assignment:
    """The tile strategy for one pass.

    Several numbers of head ranges are compared by structured assignments, and the most promising
    is searched with the effort asked for; the result is never worse than any of those.
    """
    candidates = [
        _candidate(pass_, made, options, groups) for groups in _group_counts(made, options)
    ]
    if not candidates[0].blocks:
        bounds = Bounds(0.0, 0.0, proved=True, units=str(options.units))
        return Assignment((), (), candidates[0].groups, bounds, ())
    quick = [_solve(candidate, options, Effort.INSTANT) for candidate in candidates]
    order = sorted(range(len(quick)), key=lambda i: (_relative(quick[i], candidates[i]), i))
    chosen = order[0]
    result = quick[chosen]
    if options.effort is not Effort.INSTANT:
        for index in dict.fromkeys((0, chosen)):
            searched = _solve(candidates[index], options, options.effort)
            better = _relative(searched, candidates[index]) < _relative(result, candidates[chosen])
            if index == chosen or better:
                chosen, result = index, searched
    return _assignment(candidates[chosen], result, options)


def assign_rows(pass_: Pass, made: Setting, options: TileOptions) -> Assignment:
    """The rows strategy: the owner of a query chunk computes its row; no cap is kept."""
    groups = options.head_groups or 1
    candidate = _candidate(pass_, made, options, groups)
    tiling = candidate.sized.tiling
    ranks = rows(candidate.blocks, made.q_layout)
    flat = np.full(tiling.weight.size, NO_RANK, dtype=np.int64)
    flat[candidate.sized.cell_of] = ranks
    volume = evaluate(tiling, flat.reshape(tiling.weight.shape)).max_volume / candidate.sized.unit
    bounds = Bounds(volume, 0.0, proved=volume == 0, units=str(options.units))
    return Assignment(candidate.blocks, ranks, groups, bounds, ())


def _candidate(pass_: Pass, made: Setting, options: TileOptions, groups: int) -> _Candidate:
    ranges = head_ranges(made.problem.heads, groups)
    blocks = blocks_of(made.grid, made.problem.heads, groups)
    sized = sized_problem(
        pass_,
        made.problem,
        made.q_layout,
        made.kv_layout,
        blocks,
        ranges,
        units=options.units,
        nominal=nominal_weights(made) if options.units is Units.PAPER else None,
        load_cap=options.load_cap,
        eta=options.eta,
    )
    return _Candidate(groups, blocks, sized)


def _group_counts(made: Setting, options: TileOptions) -> list[int]:
    """Numbers of head ranges worth comparing: 1, powers of two, and one a rank."""
    heads, ranks = made.problem.heads, made.q_layout.ranks
    if options.head_groups is not None:
        if not 1 <= options.head_groups <= heads:
            raise InputError(
                f"head_groups {options.head_groups} of {heads} heads: expected 1 to {heads}, "
                "since a range holds at least one head"
            )
        return [options.head_groups]
    cells = max(1, len(made.q_layout.chunks) * len(made.kv_layout.chunks))
    most = min(heads, ranks, MOST_CELLS[options.effort] // cells)
    counts = {1} | {2**k for k in range(1, 12) if 2**k <= most}
    if ranks <= most:
        counts.add(ranks)
    return sorted(counts)


def _solve(candidate: _Candidate, options: TileOptions, effort: Effort) -> TilingResult:
    return solve(
        candidate.sized.tiling,
        effort,
        pin_diagonal=options.pin_diagonal,
        strict_cap=options.strict_cap,
    )


def _relative(result: TilingResult, candidate: _Candidate) -> tuple[int, int, int, int]:
    """For comparing candidates: raised caps last, then the objective (sizes are alike)."""
    raised = result.cap_raised_to or candidate.sized.tiling.cap
    return (raised, result.max_volume, result.total, result.max_load)


def _assignment(candidate: _Candidate, result: TilingResult, options: TileOptions) -> Assignment:
    unit = candidate.sized.unit
    flat = result.assignment.reshape(-1)
    ranks: list[int] = flat[candidate.sized.cell_of].tolist()
    notes = [f"assignment: {result.origin}, {candidate.groups} head ranges"]
    if result.cap_raised_to is not None:
        mean = result.ledger.load.mean()
        notes.append(
            f"load cap raised to {result.cap_raised_to / mean:.3f} x mean: no assignment fits the "
            "one asked for"
        )
    bounds = Bounds(
        result.max_volume / unit, result.lower_bound / unit, result.proved, str(options.units)
    )
    return Assignment(candidate.blocks, ranks, candidate.groups, bounds, tuple(notes))
