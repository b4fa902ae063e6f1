"""Turns a tiling problem into proven lower bounds on its largest send or receive.

The rectangle bound. A rank that takes A remote rows and B remote columns computes at most

    f(A, B) = min(cap, own x own + own rows x its B best columns + its A best rows x own columns
                       + the best A rows x B columns elsewhere)

and adds ``A (row_in + row_out) + B (col_in + col_out)`` to the traffic. All ranks together must
cover the whole weight, and all traffic is received by someone, so N V is at least the cheapest
traffic that covers it: a small dynamic program over ranks. Each rank alone must also keep its recv
and send within V, where what others need of it is at least what it cannot compute of its own rows
with B remote columns (and of its own columns with A remote rows), divided by the cap.

For a full mask on as many chunks as ranks this is the mesh optimum, 2 (r + c - 2).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ultraattn.planning.ledger import Bools, Ints, TilingProblem

LEVELS = 4096


@dataclass(frozen=True, eq=False)
class Lines:
    """The blocks as one matrix of rows (g, i) by columns (s, j), and the least sizes of a line."""

    weight: Ints
    row_owner: Ints
    column_owner: Ints
    row_in: int
    row_out: int
    col_in: int
    col_out: int


def _least(sizes: Ints, used: Bools) -> int:
    return int(sizes[used].min()) if used.any() else 0


def flattened(problem: TilingProblem) -> Lines:
    """Flattens head ranges; a block that reads several segments counts with the first of them."""
    ranges, rows, columns = problem.weight.shape
    segments = problem.col_in.shape[0]
    weight = np.zeros((ranges, rows, segments, columns), dtype=np.int64)
    used_column = np.zeros((segments, columns), dtype=np.bool_)
    for g, read in enumerate(problem.segments):
        if read:
            weight[g, :, read[0], :] = problem.weight[g]
            used_column[read[0]] |= problem.weight[g].any(axis=0)
    used_row: Bools = np.asarray(problem.weight.any(axis=2), dtype=np.bool_)
    return Lines(
        weight=weight.reshape(ranges * rows, segments * columns),
        row_owner=np.tile(problem.q_owner, ranges),
        column_owner=np.tile(problem.kv_owner, segments),
        row_in=_least(problem.row_in, used_row),
        row_out=_least(problem.row_out, used_row),
        col_in=_least(problem.col_in, used_column),
        col_out=_least(problem.col_out, used_column),
    )


def _top(values: Ints) -> Ints:
    """Sum of the k largest, for k = 0, 1, ...: along the last axis."""
    ordered = -np.sort(-values, axis=-1)
    sums = np.cumsum(ordered, axis=-1)
    return np.concatenate([np.zeros((*values.shape[:-1], 1), dtype=np.int64), sums], axis=-1)


def _rectangles(weight: Ints) -> Ints:
    """At most this much weight in any A rows x B columns: int64 (A + 1, B + 1)."""
    by_row = _top(_top(weight).T).T  # the A rows whose B largest blocks weigh most
    by_column = _top(_top(weight.T).T)  # the B columns whose A largest blocks weigh most
    return np.asarray(np.minimum(by_row, by_column), dtype=np.int64)


def collected(lines: Lines, rank: int, cap: int) -> Ints:
    """f(A, B) of one rank (module text): int64 (A + 1, B + 1)."""
    own_row, own_column = lines.row_owner == rank, lines.column_owner == rank
    weight = lines.weight
    inside = int(weight[np.ix_(own_row, own_column)].sum())
    columns = _top(weight[np.ix_(own_row, ~own_column)].sum(axis=0))
    rows = _top(weight[np.ix_(~own_row, own_column)].sum(axis=1))
    outside = _rectangles(weight[np.ix_(~own_row, ~own_column)])
    return np.asarray(np.minimum(cap, inside + rows[:, None] + columns[None, :] + outside))


def _helpers(lines: Ints, own: Bools, cap: int) -> Ints:
    """Ranks that must help with lines when their owner brings k crossing lines: int64 (k + 1,).

    Of a line the owner computes at most the crossings it owns and the k largest others; whatever is
    left takes ceil(left / cap) others. `lines` are (lines of the owner, crossings).
    """
    left = lines.sum(axis=1) - lines[:, own].sum(axis=1)
    left = left[:, None] - _top(lines[:, ~own])
    return np.asarray((-(-left // cap)).sum(axis=0))


def _best_by_cost(gain: Ints, cost: Ints, allowed: Bools, levels: int) -> Ints:
    """The largest gain for each cost 0 ... levels - 1 (or less), -1 where nothing is allowed."""
    best = np.full(levels, -1, dtype=np.int64)
    kept = allowed & (cost < levels)
    np.maximum.at(best, cost[kept], gain[kept])
    return np.maximum.accumulate(best)


def _cover(gains: list[Ints], levels: int, enough: int) -> int | None:
    """The least summed cost at which the ranks together gain `enough`, or None."""
    total = np.zeros(levels, dtype=np.int64)
    for gain in gains:
        steps = np.flatnonzero(np.diff(gain, prepend=-1))
        joined = np.full(levels, -1, dtype=np.int64)
        for cost in steps.tolist():
            np.maximum(joined[cost:], total[: levels - cost] + gain[cost], out=joined[cost:])
        total = joined
    reached = np.flatnonzero(total >= enough)
    return int(reached[0]) if reached.size else None


def rectangle_bound(problem: TilingProblem, upper: int) -> int:
    """The rectangle bound (module text), or `upper` if no smaller volume can be excluded below it.

    `upper`: a volume some assignment reaches; the search for the bound ends there.
    """
    lines = flattened(problem)
    unit = problem.size_unit
    if not lines.weight.any() or upper <= 0 or problem.cap <= 0:
        return 0
    gains = [collected(lines, rank, problem.cap) for rank in range(problem.ranks)]
    quantum = max(unit, -(-upper * problem.ranks // LEVELS))
    costs = []
    for rank, gain in enumerate(gains):
        own_row, own_column = lines.row_owner == rank, lines.column_owner == rank
        c = _helpers(lines.weight[own_row], own_column, problem.cap)[None, :]
        d = _helpers(lines.weight[:, own_column].T, own_row, problem.cap)[:, None]
        a = np.arange(gain.shape[0], dtype=np.int64)[:, None]
        b = np.arange(gain.shape[1], dtype=np.int64)[None, :]
        recv = a * lines.row_in + b * lines.col_in
        send = a * lines.row_out + b * lines.col_out
        recv_alone = recv + c * lines.row_out + d * lines.col_out
        send_alone = send + c * lines.row_in + d * lines.col_in
        costs.append(((recv + send) // quantum, np.maximum(recv_alone, send_alone)))

    def possible(volume: int) -> bool:
        levels = volume * problem.ranks // quantum + 1
        best = [
            _best_by_cost(gain, cost, alone <= volume, levels)
            for gain, (cost, alone) in zip(gains, costs, strict=True)
        ]
        return _cover(best, levels, problem.total_weight) is not None

    low, high = 0, -(-upper // unit)  # in units; `high` is possible
    while low < high:
        middle = (low + high) // 2
        if possible(middle * unit):
            high = middle
        else:
            low = middle + 1
    return min(upper, low * unit)


def _sharers(weights: Ints, cap: int) -> tuple[int, Ints]:
    """Ranks that must share lines of these weights, and what the owner must compute to save one.

    A line of weight w, x of it computed by its owner, is needed by ceil((w - x) / cap) others at
    least: returned are the sum of ceil(w / cap), and by line the least x that makes it one less.
    """
    busy = weights[weights > 0]
    need = -(-busy // cap)
    return int(need.sum()), np.sort(busy - (need - 1) * cap)


def hot_line_bound(problem: TilingProblem) -> int:
    """What the owner of heavy rows and columns must move, since no rank can compute them alone.

    The owner computes at most `cap` of its own lines; every further rank that shares a line costs
    the owner its size. A block that lies in an own row and an own column is counted once.
    """
    lines = flattened(problem)
    cap, most = problem.cap, 0
    if cap <= 0:
        return 0
    for rank in range(problem.ranks):
        own_row, own_column = lines.row_owner == rank, lines.column_owner == rank
        for drop_rows in (True, False):
            rows = lines.weight[own_row].copy()
            columns = lines.weight[:, own_column].copy()
            if drop_rows:
                rows[:, own_column] = 0
            else:
                columns[own_row] = 0
            row_count, row_save = _sharers(rows.sum(axis=1), cap)
            column_count, column_save = _sharers(columns.sum(axis=0), cap)
            row_cost = np.concatenate([[0], np.cumsum(row_save)])
            column_cost = np.concatenate([[0], np.cumsum(column_save)])
            # (rows saved, columns saved) the owner can afford, and the volume that is left.
            affordable = row_cost[:, None] + column_cost[None, :] <= cap
            left_rows = row_count - np.arange(len(row_cost))[:, None]
            left_columns = column_count - np.arange(len(column_cost))[None, :]
            for row_size, column_size in (
                (lines.row_in, lines.col_in),
                (lines.row_out, lines.col_out),
            ):
                volume = left_rows * row_size + left_columns * column_size
                most = max(most, int(volume[affordable].min()))
    return most


def lower_bound(problem: TilingProblem, upper: int) -> int:
    """The best of the bounds here: no assignment within the cap has a smaller largest volume.

    `upper`: the volume of a known assignment; the bound is at most that.
    """
    return max(rectangle_bound(problem, upper), hot_line_bound(problem))
