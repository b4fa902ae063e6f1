"""Turns a starting assignment into better ones by annealed moves and swaps: the inner loop.

Both ways to run it as in `moves`: compiled, or as plain Python over lists.
"""

from __future__ import annotations

from typing import Any

from ultraattn.planning.moves import (
    BEST_LOAD,
    BEST_TOTAL,
    BEST_VOLUME,
    FOLLOW,
    GOAL,
    HEAVY,
    IMPROVED,
    LIGHT,
    LINES,
    LOAD_EXCESS,
    LOWER,
    OVER_GOAL,
    SIZE_UNIT,
    SQUARE,
    TARGET,
    TOTAL,
    compiled,
    draw,
    inlined,
    move,
    price,
)
from ultraattn.planning.proposals import missing, partner, target_rank

MOVES = 46
"""Of 64 proposals those that move a block. The others exchange it for one of the other rank, but
for the last few (rule[LINES]): these move all that a rank has of a row or column, every second of
them in exchange for all that the other rank has of one."""


@inlined
def _count_over(recv: Any, send: Any, state: Any, rule: Any) -> None:
    """Counts the receives and sends over the goal anew, after the goal changed."""
    over, goal = 0, rule[GOAL]
    for rank in range(len(recv)):
        over += int(recv[rank] > goal) + int(send[rank] > goal)
    state[OVER_GOAL] = over


@inlined
def _take_line(
    line: int, old: int, rank: int, line_first: Any, line_block: Any, assign: Any, pinned: Any,
    todo: Any, count: int,
) -> int:  # fmt: skip
    """Adds to what is to do that all of a line that `old` has goes to `rank`; the new count."""
    for k in range(line_first[line], line_first[line + 1]):
        block = line_block[k]
        if assign[block] == old and pinned[block] == 0:
            todo[2 * count] = block
            todo[2 * count + 1] = rank
            count += 1
    return count


@inlined
def _keep(best: Any, assign: Any, recv: Any, send: Any, load: Any, state: Any, rule: Any) -> None:
    """Keeps an assignment that reaches the goal if it is better, and lowers the goal below it."""
    volume = 0
    most = 0
    for rank in range(len(recv)):
        volume = max(volume, recv[rank], send[rank])
        most = max(most, load[rank])
    better = volume < state[BEST_VOLUME]
    if volume == state[BEST_VOLUME]:
        better = state[TOTAL] < state[BEST_TOTAL]
        if state[TOTAL] == state[BEST_TOTAL]:
            better = most < state[BEST_LOAD]
    if better:
        state[BEST_VOLUME] = volume
        state[BEST_TOTAL] = state[TOTAL]
        state[BEST_LOAD] = most
        state[IMPROVED] += 1
        for block in range(len(assign)):
            best[block] = assign[block]
    if rule[FOLLOW] == 1:
        rule[GOAL] = volume - rule[SIZE_UNIT]
        if rule[SQUARE] == 0:
            rule[TARGET] = rule[GOAL]
        _count_over(recv, send, state, rule)


@compiled
def anneal(
    steps: int,
    heats: Any,
    odds: Any,
    free: Any,
    pinned: Any,
    best: Any,
    fixed: Any,
    live: Any,
    state: Any,
    rule: Any,
    todo: Any,
) -> None:
    """`steps` proposals at each heat; the best assignment that reaches the goal ends in `best`.

    The goal is one step below the best volume known; an assignment that reaches it within the cap
    is kept, and the goal is lowered below it. What the run ends with stays in `live`.

    Args:
        heats: falling temperatures, in energy.
        odds: 1024 values of -log(u) scaled by 2**16: a proposal that costs `delta` is taken when
            ``delta <= heat * odds[random] >> 16``.
        free: the blocks that may move; pinned: 1 for those that may not.
        todo: room for (block, rank) pairs, twice as long as there are blocks, and at least 4.
    """
    weight, first, line_of, owner, size_in, size_out, line_first, line_block = fixed
    assign, after, before, cursor, counts, recv, send, load = live
    ranks = len(recv)
    movable = len(free)
    whole = 64 - rule[LINES]
    _count_over(recv, send, state, rule)
    if state[OVER_GOAL] == 0 and state[LOAD_EXCESS] == 0:
        _keep(best, assign, recv, send, load, state, rule)
    for heat in heats:
        level = 0
        if rule[SQUARE] > 0:
            rule[TARGET] = state[TOTAL] // ranks
        for _ in range(steps):
            if rule[FOLLOW] == 1 and state[BEST_VOLUME] <= rule[LOWER]:
                return
            if state[LOAD_EXCESS] == 0:
                level += 1
            block = free[draw(state, movable)]
            old = assign[block]
            begin = first[block]
            span = first[block + 1] - begin
            line = line_of[begin + draw(state, span)]
            rank = target_rank(
                block, line, first, line_of, owner, line_first, line_block, assign, counts,
                ranks, state,
            )  # fmt: skip
            if rank == old:
                continue
            if missing(block, rank, ranks, first, line_of, counts) > 1 and draw(state, 8) != 0:
                continue
            chance = draw(state, 65536)
            limit = (heat * odds[chance >> 6]) >> 16
            kind = chance & 63
            count = 1
            todo[0] = block
            todo[1] = rank
            if kind >= MOVES:
                other = partner(rank, old, first, line_of, after, cursor, counts, ranks, state)
                if kind < whole:
                    if other < 0 or pinned[other] == 1:
                        continue
                    todo[2] = other
                    todo[3] = old
                    count = 2
                else:
                    line = line_of[begin + draw(state, span)]
                    count = _take_line(
                        line, old, rank, line_first, line_block, assign, pinned, todo, 0
                    )
                    if kind & 1 == 1 and other >= 0:
                        begin = first[other]
                        line = line_of[begin + draw(state, first[other + 1] - begin)]
                        count = _take_line(
                            line, rank, old, line_first, line_block, assign, pinned, todo, count
                        )
            # All but the last are made before their price is known, and unmade if it is too high.
            cost = 0
            for k in range(count):
                block = todo[2 * k]
                rank = todo[2 * k + 1]
                cost += price(
                    block, rank, weight, first, line_of, owner, size_in, size_out, assign,
                    counts, recv, send, load, rule,
                )  # fmt: skip
                if k == count - 1 and cost > limit:
                    break
                todo[2 * k + 1] = assign[block]
                move(
                    block, rank, weight, first, line_of, owner, size_in, size_out, assign, after,
                    before, cursor, counts, recv, send, load, state, rule,
                )  # fmt: skip
            if cost > limit:
                for k in range(count - 2, -1, -1):
                    move(
                        todo[2 * k], todo[2 * k + 1], weight, first, line_of, owner, size_in,
                        size_out, assign, after, before, cursor, counts, recv, send, load, state,
                        rule,
                    )  # fmt: skip
                continue
            if (
                state[OVER_GOAL] == 0
                and state[LOAD_EXCESS] == 0
                and (rule[FOLLOW] == 1 or state[TOTAL] <= state[BEST_TOTAL])
            ):
                _keep(best, assign, recv, send, load, state, rule)
        # Level loads for a tenth to a third of the time: rarely means more weight, often less.
        if 10 * level < steps:
            rule[HEAVY] = rule[HEAVY] * 9 // 8 + 1
        elif 3 * level > steps and rule[HEAVY] * 8 // 9 >= rule[LIGHT]:
            rule[HEAVY] = rule[HEAVY] * 8 // 9
