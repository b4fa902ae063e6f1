"""Turns an assignment that overloads ranks into one within the cap, with little extra traffic."""

from __future__ import annotations

import numpy as np

from ultraattn.planning.ledger import NO_RANK, Ints, TilingProblem


def repair(problem: TilingProblem, assignment: Ints, pinned: Ints) -> Ints | None:
    """Moves blocks from the most loaded rank to ranks with room until none is over the cap.

    Each step takes the block and the rank for which the lines that have to be fetched, less those
    no longer needed, are smallest; then the other blocks of that row or column which fit follow.
    None where blocks and room do not fit together.
    """
    block, weight = problem.blocks, problem.block_weight
    rank_of = assignment[problem.weight > 0].copy()
    ranges, rows, columns = problem.weight.shape
    row = block[:, 0] * rows + block[:, 1]
    row_owner = np.tile(problem.q_owner, ranges)
    row_size = (problem.row_in + problem.row_out).ravel()
    column_size = problem.col_in + problem.col_out
    row_count = np.zeros((problem.ranks, ranges * rows), dtype=np.int64)
    np.add.at(row_count, (rank_of, row), 1)
    column_count = np.zeros((problem.ranks, len(column_size), columns), dtype=np.int64)
    for g, segments in enumerate(problem.segments):
        own = block[:, 0] == g
        for segment in segments:
            np.add.at(column_count, (rank_of[own], segment, block[own, 2]), 1)
    load = np.zeros(problem.ranks, dtype=np.int64)
    np.add.at(load, rank_of, weight)
    every = np.arange(problem.ranks)
    reads = problem.reads.astype(np.int64)
    foreign = every[:, None] != row_owner, (every[:, None] != problem.kv_owner)[:, None, :]
    # What a rank fetches if it takes a block: its row, (ranks, G Pq), and the columns that its head
    # range reads, (ranks, G, Pk); 0 for what the rank has.
    row_cost = np.where((row_count == 0) & foreign[0], row_size, 0)
    column_cost = np.where((column_count == 0) & foreign[1], column_size, 0)
    column_cost = np.einsum("gs,rsk->rgk", reads, column_cost)

    def put(moved: Ints, rank: int) -> None:
        old = int(rank_of[moved[0]])
        rank_of[moved] = rank
        for sign, where in ((-1, old), (1, rank)):
            load[where] += sign * int(weight[moved].sum())
            np.add.at(row_count[where], row[moved], sign)
            for g, segments in enumerate(problem.segments):
                own = moved[block[moved, 0] == g]
                for segment in segments:
                    np.add.at(column_count[where, segment], block[own, 2], sign)
            row_cost[where] = np.where((row_count[where] == 0) & foreign[0][where], row_size, 0)
            fetched = np.where((column_count[where] == 0) & foreign[1][where], column_size, 0)
            column_cost[where] = reads @ fetched

    for _ in range(2 * len(block)):
        worst = int(np.argmax(load))
        if load[worst] <= problem.cap:
            return problem.spread(rank_of)
        mine = np.flatnonzero((rank_of == worst) & (pinned == NO_RANK))
        if not len(mine):
            return None
        room = problem.cap - load
        able = np.flatnonzero(room >= weight[mine].min())
        if not len(able):
            pair = _exchange(weight, rank_of, mine, np.flatnonzero(pinned == NO_RANK), room)
            if pair is None:
                return None
            rank = int(rank_of[pair[1]])
            put(pair[:1], rank)
            put(pair[1:], worst)
            continue
        cost = row_cost[able[:, None], row[mine]]
        cost += column_cost[able[:, None], block[mine, 0], block[mine, 2]]
        cost[weight[mine] > room[able][:, None]] = np.iinfo(np.int64).max
        # Among equals the emptiest rank, so that lines can follow each other.
        cheapest = cost == cost.min()
        pick = int(np.argmax(np.where(cheapest.any(axis=1), room[able], -1)))
        rank = int(able[pick])
        chosen = mine[int(np.argmax(cheapest[pick]))]
        same_row = mine[row[mine] == row[chosen]]
        same_column = mine[
            (block[mine, 2] == block[chosen, 2]) & (block[mine, 0] == block[chosen, 0])
        ]
        line = same_row if len(same_row) <= len(same_column) else same_column
        line = np.concatenate([[chosen], line[line != chosen]])
        filled = np.cumsum(weight[line])
        over = int(load[worst]) - problem.cap
        few = int(np.searchsorted(filled, over)) + 1
        many = int(np.searchsorted(filled, int(room[rank]), side="right"))
        put(line[: max(1, min(few, many))], rank)
    return None


def _exchange(weight: Ints, rank_of: Ints, mine: Ints, free: Ints, room: Ints) -> Ints | None:
    """A block of `mine` and a lighter one of a rank that has room for the difference, or None."""
    lighter = weight[mine][:, None] - weight[free][None, :]
    fits = (lighter > 0) & (lighter <= room[rank_of[free]][None, :])
    fits &= (rank_of[free] != rank_of[mine[0]])[None, :]
    pairs = np.argwhere(fits)
    if not len(pairs):
        return None
    first = pairs[int(np.argmax(lighter[fits]))]
    return np.array([mine[first[0]], free[first[1]]], dtype=np.int64)
