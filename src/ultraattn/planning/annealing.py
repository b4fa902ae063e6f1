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

MOVES = 48
"""Of 64 proposals those that move a block; the others exchange it for one of the other rank."""


@inlined
def _count_over(recv: Any, send: Any, state: Any, rule: Any) -> None:
    """Counts the receives and sends over the goal anew, after the goal changed."""
    over, goal = 0, rule[GOAL]
    for rank in range(len(recv)):
        over += int(recv[rank] > goal) + int(send[rank] > goal)
    state[OVER_GOAL] = over


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
) -> None:
    """`steps` proposals at each heat; the best assignment that reaches the goal ends in `best`.

    The goal is one step below the best volume known; an assignment that reaches it within the cap
    is kept, and the goal is lowered below it. What the run ends with stays in `live`.

    Args:
        heats: falling temperatures, in energy.
        odds: 1024 values of -log(u) scaled by 2**16: a proposal that costs `delta` is taken when
            ``delta <= heat * odds[random] >> 16``.
        free: the blocks that may move; pinned: 1 for those that may not.
    """
    weight, first, line_of, owner, size_in, size_out, line_first, line_block = fixed
    assign, after, before, cursor, counts, recv, send, load = live
    ranks = len(recv)
    movable = len(free)
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
            other = -1
            if chance & 63 >= MOVES:
                other = partner(rank, old, first, line_of, after, cursor, counts, ranks, state)
                if other < 0 or pinned[other] == 1:
                    continue
            cost = price(
                block, rank, weight, first, line_of, owner, size_in, size_out, assign, counts,
                recv, send, load, rule,
            )  # fmt: skip
            if other < 0 and cost > limit:
                continue
            move(
                block, rank, weight, first, line_of, owner, size_in, size_out, assign, after,
                before, cursor, counts, recv, send, load, state, rule,
            )  # fmt: skip
            if other >= 0:
                cost += price(
                    other, old, weight, first, line_of, owner, size_in, size_out, assign,
                    counts, recv, send, load, rule,
                )  # fmt: skip
                back = cost > limit
                if back:
                    other = block
                move(
                    other, old, weight, first, line_of, owner, size_in, size_out, assign, after,
                    before, cursor, counts, recv, send, load, state, rule,
                )  # fmt: skip
                if back:
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
