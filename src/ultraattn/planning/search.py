"""Turns a starting assignment into a better one: drives the inner loop of `annealing`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ultraattn.planning import annealing, moves
from ultraattn.planning.ledger import Ints, TilingProblem, Value, evaluate

ODDS = [round(-math.log((k + 0.5) / 1024) * 65536) for k in range(1024)]


def _seed(number: int) -> int:
    """A start of the 32-bit generator, never 0: the mixer of splitmix64."""
    z = (number + 1) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return ((z ^ (z >> 31)) & 0xFFFFFFFF) or 1


def _native(values: Ints | Sequence[int], dtype: type[np.signedinteger[Any]] = np.int64) -> Any:
    """An array where the inner loop is compiled, else a list, which plain Python reads faster."""
    array = np.ascontiguousarray(values, dtype=dtype)
    return array if moves.COMPILED else array.tolist()


def _places(values: Ints | Sequence[int]) -> Any:
    """As `_native`, for numbers of blocks, lines and ranks: half as long, and so read faster."""
    return _native(values, np.int32)


@dataclass(frozen=True, eq=False)
class Arena:
    """A problem as the flat arrays of the inner loop; lines are rows first, then columns."""

    problem: TilingProblem
    fixed: tuple[Any, ...]
    free: Any
    pinned: Any
    block_line: Ints
    line_size: int
    odds: Any

    @staticmethod
    def make(problem: TilingProblem, pinned: Ints | None = None) -> Arena:
        """`pinned`: 1 for every block (in their order) that may not move."""
        ranges, rows, columns = problem.weight.shape
        block = problem.blocks
        count = len(block)
        fixed = np.zeros(count, dtype=np.int64) if pinned is None else pinned
        line = [block[:, 0] * rows + block[:, 1]]
        index = [np.arange(count)]
        for g, segments in enumerate(problem.segments):
            own = np.flatnonzero(block[:, 0] == g)
            for segment in segments:
                line.append(ranges * rows + segment * columns + block[own, 2])
                index.append(own)
        line_of, block_of = np.concatenate(line), np.concatenate(index)
        by_block = np.lexsort((line_of, block_of))
        by_line = np.lexsort((block_of, line_of))
        many = ranges * rows + problem.col_in.size

        def starts(values: Ints, size: int) -> Ints:
            return np.concatenate([[0], np.cumsum(np.bincount(values, minlength=size))])

        owner = [np.tile(problem.q_owner, ranges), np.tile(problem.kv_owner, len(problem.col_in))]
        size_in = np.concatenate([problem.row_in.ravel(), problem.col_in.ravel()])
        size_out = np.concatenate([problem.row_out.ravel(), problem.col_out.ravel()])
        return Arena(
            problem=problem,
            fixed=(
                _native(problem.block_weight),
                _places(starts(block_of, count)),
                _places(line_of[by_block]),
                _places(np.concatenate(owner)),
                _native(size_in),
                _native(size_out),
                _places(starts(line_of, many)),
                _places(block_of[by_line]),
            ),
            free=_places(np.flatnonzero(fixed == 0)),
            pinned=_native(fixed),
            block_line=np.stack([block_of, line_of]),
            line_size=max(1, int((size_in + size_out).mean())),
            odds=_native(ODDS),
        )


@dataclass(frozen=True)
class Style:
    """How an annealing weighs things, and how hot it is.

    Attributes:
        hot, cold: first and last temperature, in hundredths of the mean size of a line.
        hard: weight of volume over the goal.
        heavy: weight of load over the cap, a heaviest block counting as a line.
        soft: weight of all traffic.
        square: weight of the squares of volumes over the mean, a line counting as two; then `hard`
            is no volume over the goal but over the mean.
        lines: of 64 proposals, those that move all that a rank has of a row or column.
    """

    hot: int
    cold: int
    hard: int
    heavy: int
    soft: int
    square: int = 0
    lines: int = 0

    def temperatures(self, rounds: int, unit: int) -> list[int]:
        """Falling geometrically from hot to cold."""
        ratio = (self.cold / self.hot) ** (1 / max(1, rounds - 1))
        return [int(self.hot * ratio**k * 1000) * unit // 100_000 for k in range(rounds)]


SOFT = 64
SQUARE_BITS = 6
"""Bits of the mean size of a line where sizes are squared."""


def _rings(start: Ints, ranks: int) -> tuple[Ints, Ints, Ints]:
    """The blocks of each rank as a ring: next block, block before, and one block of each rank."""
    order = np.argsort(start, kind="stable")
    after, before = np.empty_like(start), np.empty_like(start)
    cursor = np.full(ranks, -1, dtype=np.int64)
    cuts = np.searchsorted(start[order], np.arange(ranks + 1))
    for rank in range(ranks):
        own = order[cuts[rank] : cuts[rank + 1]]
        if len(own):
            after[own], before[own] = np.roll(own, -1), np.roll(own, 1)
            cursor[rank] = own[0]
    return after, before, cursor


@dataclass(frozen=True, eq=False)
class Annealed:
    """What a run found: the better of its best and the best known before, and where it ended.

    Attributes:
        value, ranks: of the better one; ranks in the order of blocks.
        last: the ranks it ended with, which may be over the cap.
    """

    value: Value
    ranks: Ints
    last: Ints


def anneal(
    arena: Arena,
    start: Ints,
    style: Style,
    rounds: int,
    steps: int,
    *,
    seed: int,
    lower: int,
    best: tuple[Value, Ints],
    follow: bool = True,
) -> Annealed:
    """One run from `start` (ranks in the order of blocks), with `best` as the best known before.

    `rounds` falling temperatures with `steps` proposals each.

    `follow`: hunt for a smaller volume than the best; otherwise for less traffic at that volume.
    """
    problem = arena.problem
    if not len(arena.free):
        return Annealed(*best, start)
    ledger = evaluate(problem, problem.spread(start))
    unit, many, mean = problem.size_unit, len(arena.fixed[3]), arena.line_size
    counts = np.bincount(
        arena.block_line[1] * problem.ranks + start[arena.block_line[0]],
        minlength=problem.ranks * many,
    )
    counts[np.arange(many) * problem.ranks + np.asarray(arena.fixed[3], dtype=np.int64)] += 1
    goal = max(best[0][0] - (unit if follow else 0), lower)
    excess = int(np.maximum(ledger.load - problem.cap, 0).sum())
    state = [0] * moves.STATE_SIZE
    state[moves.RANDOM] = _seed(seed)
    state[moves.LOAD_EXCESS] = excess
    state[moves.TOTAL] = ledger.total
    state[moves.BEST_VOLUME : moves.BEST_LOAD + 1] = best[0]
    rule = [0] * moves.RULE_SIZE
    rule[moves.TARGET], rule[moves.GOAL], rule[moves.CAP] = goal, goal, problem.cap
    rule[moves.HARD], rule[moves.SOFT] = style.hard * SOFT, style.soft * SOFT
    rule[moves.SIZE_SHIFT] = coarse = max(0, mean.bit_length() - SQUARE_BITS)
    rule[moves.SQUARE] = (2 * style.square * SOFT << 2 * coarse) // mean
    heaviest = int(problem.block_weight.max())
    rule[moves.LOAD_SHIFT] = shift = max(0, heaviest.bit_length() - 1)
    rule[moves.HEAVY] = ((style.heavy * SOFT * mean) << shift) // heaviest
    rule[moves.LIGHT] = max(1, rule[moves.HEAVY] // 4)
    rule[moves.SIZE_UNIT], rule[moves.LOWER] = unit, lower
    rule[moves.FOLLOW], rule[moves.LINES] = int(follow), style.lines
    kept, scalars = _places(start.copy()), _native(state)
    live = tuple(
        make(array)
        for make, array in (
            (_places, start.copy()),
            *((_places, ring) for ring in _rings(start, problem.ranks)),
            (_places, counts),
            (_native, ledger.recv),
            (_native, ledger.send),
            (_native, ledger.load),
        )
    )
    annealing.anneal(
        steps,
        _native(style.temperatures(rounds, mean * SOFT)),
        arena.odds,
        arena.free,
        arena.pinned,
        kept,
        arena.fixed,
        live,
        scalars,
        _native(rule),
        _places(np.zeros(2 * len(start) + 2, dtype=np.int64)),
    )
    last = np.asarray(live[0], dtype=np.int64)
    if not scalars[moves.IMPROVED]:
        return Annealed(*best, last)
    value = tuple(int(v) for v in scalars[moves.BEST_VOLUME : moves.BEST_LOAD + 1])
    return Annealed((value[0], value[1], value[2]), np.asarray(kept, dtype=np.int64), last)
