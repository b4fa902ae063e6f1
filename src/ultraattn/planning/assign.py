"""Chooses a rank for every block of a pass: the least busiest link that a load cap allows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from ultraattn.chunks import Ints
from ultraattn.errors import InputError
from ultraattn.planning.blocks import head_ranges
from ultraattn.planning.bounds import lower_bound
from ultraattn.planning.ledger import NO_RANK, TilingProblem, evaluate
from ultraattn.planning.setting import Setting, nominal_weights
from ultraattn.planning.sizes import SizedProblem, Units, sized_problem
from ultraattn.planning.starts import Found, structured_starts
from ultraattn.planning.tiling import (
    Effort,
    TilingResult,
    pin_diagonal_blocks,
    solve,
    within_cap,
)
from ultraattn.plans.check import Pass
from ultraattn.plans.plan import Bounds
from ultraattn.plans.program import Block
from ultraattn.strategies import rows

MOST_CELLS = {
    Effort.INSTANT: 4_096,
    Effort.FAST: 16_384,
    Effort.NORMAL: 32_768,
    Effort.BEST: 262_144,
}
"""Cells of all head ranges together, up to which more ranges are tried."""

MANY_RANKS = 16
"""Over more ranks one assignment of each number of head ranges is levelled; each takes long."""


LEVELLED = 4
"""Assignments of each number of head ranges that are levelled for comparison, over fewer ranks."""


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
    origin: str = "rows"
    """The structured assignment or the search that it comes from."""


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
    return made.once(("tiles", pass_, options), lambda: _assign_tiles(pass_, made, options))


def _assign_tiles(pass_: Pass, made: Setting, options: TileOptions) -> Assignment:
    candidates = [
        _candidate(pass_, made, options, groups) for groups in _group_counts(made, options)
    ]
    if not candidates[0].blocks:
        bounds = Bounds(0.0, 0.0, proved=True, units=str(options.units))
        return Assignment((), (), candidates[0].groups, bounds, ())
    pinned = [_pinned(candidate, options) for candidate in candidates]
    quick = [
        _structured(candidate, fixed, options)
        for candidate, fixed in zip(candidates, pinned, strict=True)
    ]
    chosen = min(range(len(quick)), key=lambda i: (quick[i].raised, quick[i].best.value, i))
    if options.effort is Effort.INSTANT:
        return _unsearched(candidates[chosen], quick[chosen], options)
    return _assignment(candidates[chosen], _solve(candidates[chosen], options), options)


def assign_structured(
    pass_: Pass, made: Setting, options: TileOptions, most: int
) -> Sequence[Assignment]:
    """Structured assignments of every number of head ranges, at most so many of each.

    Rows, columns, heads and meshes within the load cap, or levelled; those that move least first.
    """
    name = ("structured", pass_, options, most)
    return made.once(name, lambda: list(_assign_structured(pass_, made, options, most)))


def _assign_structured(
    pass_: Pass, made: Setting, options: TileOptions, most: int
) -> Iterator[Assignment]:
    for groups in _group_counts(made, options):
        candidate = _candidate(pass_, made, options, groups)
        if not candidate.blocks:
            return
        pinned = _pinned(candidate, options)
        problem = within_cap(candidate.sized.tiling, pinned, options.strict_cap)
        few = options.effort is Effort.INSTANT or made.q_layout.ranks > MANY_RANKS
        repairs = 1 if few else LEVELLED
        for found in structured_starts(problem, pinned, repairs=repairs)[:most]:
            volume = found.value[0] / candidate.sized.unit
            yield Assignment(
                candidate.blocks,
                _ranks(candidate, found.assignment),
                groups,
                Bounds(volume, 0.0, volume == 0, str(options.units)),
                (f"assignment: {found.origin}, {groups} head ranges, not searched",),
                found.origin,
            )


def bounded(pass_: Pass, made: Setting, options: TileOptions, found: Assignment) -> Bounds:
    """What is known of an assignment that no search has bounded."""
    if not found.blocks or found.bounds.proved:
        return found.bounds
    candidate = _candidate(pass_, made, options, found.head_groups)
    problem = within_cap(candidate.sized.tiling, _pinned(candidate, options), options.strict_cap)
    load = np.zeros(problem.ranks, dtype=np.int64)
    np.add.at(load, np.array(found.ranks), np.array([b.weight for b in found.blocks]))
    if options.units is Units.BYTES and int(load.max()) > problem.cap:
        return found.bounds  # A bound holds within the cap only.
    value = round(found.bounds.max_volume * candidate.sized.unit)
    least = min(lower_bound(problem, value), value)
    volume, unit = found.bounds.max_volume, candidate.sized.unit
    return Bounds(volume, least / unit, least == value, str(options.units))


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
    blocks = made.blocks(groups)
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
    powers = () if options.effort is Effort.INSTANT else range(1, 12)
    counts = {1} | {2**k for k in powers if 2**k <= most}
    if ranks <= most:
        counts.add(ranks)
    return sorted(counts)


@dataclass(frozen=True, eq=False)
class _Quick:
    """The best structured assignment of a candidate, and the cap it keeps."""

    problem: TilingProblem
    best: Found
    raised: int
    """How far the cap had to be raised; compared first between candidates."""


def _pinned(candidate: _Candidate, options: TileOptions) -> Ints:
    tiling = candidate.sized.tiling
    if options.pin_diagonal:
        return pin_diagonal_blocks(tiling)
    return np.full(len(tiling.blocks), NO_RANK, dtype=np.int64)


def _structured(candidate: _Candidate, pinned: Ints, options: TileOptions) -> _Quick:
    """Rows, columns, meshes, heads, or the cheapest of them after levelling."""
    asked = candidate.sized.tiling
    problem = within_cap(asked, pinned, options.strict_cap)
    repairs = 1 if options.effort is Effort.INSTANT else 4
    best = structured_starts(problem, pinned, repairs=repairs)[0]
    return _Quick(problem, best, problem.cap - asked.cap)


def _unsearched(candidate: _Candidate, quick: _Quick, options: TileOptions) -> Assignment:
    """What `instant` gives: no search, and no bound but that nothing moves less than nothing."""
    best, unit = quick.best, candidate.sized.unit
    notes = [f"assignment: {best.origin}, {candidate.groups} head ranges, not searched"]
    if quick.raised:
        notes.append(_raised_note(quick.problem.cap, quick.problem))
    volume = best.value[0]
    bounds = Bounds(volume / unit, 0.0, volume == 0, str(options.units))
    return Assignment(
        candidate.blocks,
        _ranks(candidate, best.assignment),
        candidate.groups,
        bounds,
        tuple(notes),
        best.origin,
    )


def _ranks(candidate: _Candidate, assignment: Ints) -> list[int]:
    ranks: list[int] = assignment.reshape(-1)[candidate.sized.cell_of].tolist()
    return ranks


def _raised_note(cap: int, problem: TilingProblem) -> str:
    over = cap * problem.ranks / problem.total_weight
    return f"load cap raised to {over:.3f} x mean: no assignment fits the one asked for"


def _solve(candidate: _Candidate, options: TileOptions) -> TilingResult:
    return solve(
        candidate.sized.tiling,
        options.effort,
        pin_diagonal=options.pin_diagonal,
        strict_cap=options.strict_cap,
    )


def _assignment(candidate: _Candidate, result: TilingResult, options: TileOptions) -> Assignment:
    unit = candidate.sized.unit
    notes = [f"assignment: {result.origin}, {candidate.groups} head ranges"]
    if result.cap_raised_to is not None:
        notes.append(_raised_note(result.cap_raised_to, candidate.sized.tiling))
    bounds = Bounds(
        result.max_volume / unit, result.lower_bound / unit, result.proved, str(options.units)
    )
    ranks = _ranks(candidate, result.assignment)
    return Assignment(
        candidate.blocks, ranks, candidate.groups, bounds, tuple(notes), result.origin
    )
