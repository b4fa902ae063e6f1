"""Turns an assignment into a better one by annealed moves, swaps and whole lines: the inner loop.

Integers only, and one source for both ways to run it: compiled where numba is installed, as plain
Python over lists where it is not. Both take the same decisions, so both give the same plan.

A rank's energy, for a target volume T and a load cap:

    hard (max(0, recv - T) + max(0, send - T)) + heavy max(0, load - cap) / unit + soft recv

An assignment without violation (volume over T, load over cap) is a solution of volume at most T;
it is kept when it is better, and T is then lowered below it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

try:
    from numba import njit as _njit

    COMPILED = True
except ImportError:
    COMPILED = False

F = TypeVar("F", bound=Callable[..., Any])


def _compile(function: F) -> F:
    """`function` compiled, or as it is where numba is missing."""
    return _njit(cache=True, nogil=True)(function) if COMPILED else function  # type: ignore[return-value]


# `fixed` is (weight, first, line_of, owner, size_in, size_out, line_first, line_block): lines of
# block b are line_of[first[b]:first[b + 1]], its row and its columns; the blocks of line l are
# line_block[line_first[l]:line_first[l + 1]]; a line has an owner and sizes that go in and out.
#
# `live` is (assign, after, before, cursor, counts, recv, send, load): a rank's blocks are a ring
# (after, before) that cursor points into, -1 when empty; counts[rank * lines + line] counts them.

# Places in `state`, the scalars that change during a run.
RANDOM, HARD_EXCESS, LOAD_EXCESS, TOTAL = 0, 1, 2, 3
BEST_VOLUME, BEST_TOTAL, BEST_LOAD, IMPROVED = 4, 5, 6, 7
STATE_SIZE = 8

# Places in `rule`, the scalars that do not, but for TARGET and HEAVY.
TARGET, CAP, HARD, HEAVY, SOFT, LOAD_SHIFT, SIZE_UNIT, LOWER = 0, 1, 2, 3, 4, 5, 6, 7
FOLLOW = 8  # 1: lower the target with every solution; 0: keep it and lower the total
LIGHT = 9  # the least HEAVY may become
RULE_SIZE = 10


# Of 64 proposals: single moves below MOVE, swaps below SWAP, then whole lines, the last exchanged.
MOVE, SWAP = 28, 58


@_compile
def draw(state: Any, count: int) -> int:
    """A number below `count`: xorshift of 32 bits, the same on every machine."""
    x = state[RANDOM]
    x ^= (x << 13) & 0xFFFFFFFF
    x ^= x >> 17
    x ^= (x << 5) & 0xFFFFFFFF
    state[RANDOM] = x
    return int((x * count) >> 32)


@_compile
def _shift(rank: int, more_recv: int, more_send: int, live: Any, state: Any, rule: Any) -> int:
    """Changes a rank's volumes; returns the change of energy."""
    recv, send = live[5], live[6]
    target = rule[TARGET]
    over = 0
    if recv[rank] > target:
        over -= recv[rank] - target
    if send[rank] > target:
        over -= send[rank] - target
    recv[rank] += more_recv
    send[rank] += more_send
    if recv[rank] > target:
        over += recv[rank] - target
    if send[rank] > target:
        over += send[rank] - target
    state[HARD_EXCESS] += over
    state[TOTAL] += more_recv
    return over * rule[HARD] + more_recv * rule[SOFT]  # type: ignore[no-any-return]


@_compile
def _carry(rank: int, more: int, live: Any, state: Any, rule: Any) -> int:
    """Changes a rank's load; returns the change of energy."""
    load = live[7]
    old = load[rank] - rule[CAP]
    new = old + more
    load[rank] += more
    if old < 0:
        old = 0
    if new < 0:
        new = 0
    if old == new:
        return 0
    state[LOAD_EXCESS] += new - old
    heavy, shift = rule[HEAVY], rule[LOAD_SHIFT]
    return ((new * heavy) >> shift) - ((old * heavy) >> shift)  # type: ignore[no-any-return]


@_compile
def move(block: int, rank: int, fixed: Any, live: Any, state: Any, rule: Any) -> int:
    """Puts a block on a rank; returns the change of energy."""
    weight, first, line_of, owner, size_in, size_out, _, _ = fixed
    assign, after, before, cursor, counts, _, _, _ = live
    many = len(owner)
    old = assign[block]
    assign[block] = rank
    if after[block] == block:
        cursor[old] = -1
    else:
        after[before[block]] = after[block]
        before[after[block]] = before[block]
        if cursor[old] == block:
            cursor[old] = after[block]
    at = cursor[rank]
    if at < 0:
        cursor[rank] = block
        after[block] = block
        before[block] = block
    else:
        after[block] = at
        before[block] = before[at]
        after[before[at]] = block
        before[at] = block
    delta = _carry(old, -weight[block], live, state, rule)
    delta += _carry(rank, weight[block], live, state, rule)
    for k in range(first[block], first[block + 1]):
        line = line_of[k]
        own = owner[line]
        here = old * many + line
        counts[here] -= 1
        if counts[here] == 0 and own != old:
            delta += _shift(old, -size_in[line], -size_out[line], live, state, rule)
            delta += _shift(own, -size_out[line], -size_in[line], live, state, rule)
        here = rank * many + line
        counts[here] += 1
        if counts[here] == 1 and own != rank:
            delta += _shift(rank, size_in[line], size_out[line], live, state, rule)
            delta += _shift(own, size_out[line], size_in[line], live, state, rule)
    return int(delta)


@_compile
def _over(rank: int, more_recv: int, more_send: int, live: Any, target: int) -> int:
    """The change of volume over the target if a rank's volumes changed."""
    recv, send = live[5][rank] - target, live[6][rank] - target
    over = 0
    if recv > 0:
        over -= recv
    if send > 0:
        over -= send
    if recv + more_recv > 0:
        over += recv + more_recv
    if send + more_send > 0:
        over += send + more_send
    return int(over)


@_compile
def price(block: int, rank: int, fixed: Any, live: Any, rule: Any) -> int:
    """The change of energy that `move` would return, without moving.

    The columns of a block have one owner, so that at most four ranks change: the old and the new
    one, the row's owner and the columns' owner.
    """
    weight, first, line_of, owner, size_in, size_out, _, _ = fixed
    assign, counts, load = live[0], live[4], live[7]
    many = len(owner)
    old = assign[block]
    target = rule[TARGET]
    old_recv = old_send = new_recv = new_send = own_recv = own_send = over = total = 0
    last = -1
    for k in range(first[block], first[block + 1]):
        line = line_of[k]
        own = owner[line]
        change = 0
        if own != old and counts[old * many + line] == 1:
            old_recv -= size_in[line]
            old_send -= size_out[line]
            change -= 1
        if own != rank and counts[rank * many + line] == 0:
            new_recv += size_in[line]
            new_send += size_out[line]
            change += 1
        if change != 0:
            total += change * (size_in[line] + size_out[line])
            if own == old:
                old_recv += change * size_out[line]
                old_send += change * size_in[line]
            elif own == rank:
                new_recv += change * size_out[line]
                new_send += change * size_in[line]
            else:
                if own != last and last >= 0:
                    over += _over(last, own_recv, own_send, live, target)
                    own_recv = 0
                    own_send = 0
                last = own
                own_recv += change * size_out[line]
                own_send += change * size_in[line]
    if last >= 0:
        over += _over(last, own_recv, own_send, live, target)
    over += _over(old, old_recv, old_send, live, target)
    over += _over(rank, new_recv, new_send, live, target)
    delta = over * rule[HARD] + total * rule[SOFT]
    heavy, shift, cap = rule[HEAVY], rule[LOAD_SHIFT], rule[CAP]
    before = load[old] - cap
    after = before - weight[block]
    if before > 0:
        delta += ((max(after, 0) * heavy) >> shift) - ((before * heavy) >> shift)
    before = load[rank] - cap
    after = before + weight[block]
    if after > 0:
        delta += ((after * heavy) >> shift) - ((max(before, 0) * heavy) >> shift)
    return int(delta)


@_compile
def _missing(block: int, rank: int, fixed: Any, live: Any) -> int:
    """How many lines of a block a rank would have to fetch for it."""
    first, line_of, owner, counts = fixed[1], fixed[2], fixed[3], live[4]
    many = len(owner)
    missing = 0
    for k in range(first[block], first[block + 1]):
        if owner[line_of[k]] != rank and counts[rank * many + line_of[k]] == 0:
            missing += 1
    return missing


@_compile
def _excess(live: Any, state: Any, rule: Any) -> None:
    """Counts the volume over the target anew, after the target changed."""
    recv, send = live[5], live[6]
    over = 0
    target = rule[TARGET]
    for rank in range(len(recv)):
        if recv[rank] > target:
            over += recv[rank] - target
        if send[rank] > target:
            over += send[rank] - target
    state[HARD_EXCESS] = over


@_compile
def _keep(best: Any, live: Any, state: Any, rule: Any) -> None:
    """Keeps an assignment without violation if it is better, and lowers the target below it."""
    assign, recv, send, load = live[0], live[5], live[6], live[7]
    volume = 0
    most = 0
    for rank in range(len(recv)):
        if recv[rank] > volume:
            volume = recv[rank]
        if send[rank] > volume:
            volume = send[rank]
        if load[rank] > most:
            most = load[rank]
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
        rule[TARGET] = volume - rule[SIZE_UNIT]
        _excess(live, state, rule)


@_compile
def _target_rank(block: int, line: int, fixed: Any, live: Any, state: Any) -> int:
    """A rank to propose for a block: one that has its line, the better of a few; or any."""
    assign, cursor = live[0], live[3]
    line_first, line_block = fixed[6], fixed[7]
    way = draw(state, 32)
    if way < 2:
        return draw(state, len(cursor))
    if way < 7:
        return fixed[3][line]  # type: ignore[no-any-return]
    span = line_first[line + 1] - line_first[line]
    rank = assign[line_block[line_first[line] + draw(state, span)]]
    if way < 12:
        return rank  # type: ignore[no-any-return]
    for _ in range(4):
        if rank != assign[block] and _missing(block, rank, fixed, live) == 0:
            return rank  # type: ignore[no-any-return]
        rank = assign[line_block[line_first[line] + draw(state, span)]]
    return rank  # type: ignore[no-any-return]


@_compile
def _partner(rank: int, old: int, fixed: Any, live: Any, state: Any) -> int:
    """A block of `rank` to give to `old` in exchange: of a few, the one that needs least; or -1."""
    after, cursor = live[1], live[3]
    at = cursor[rank]
    if at < 0:
        return -1
    for _ in range(draw(state, 8)):
        at = after[at]
    found = at
    least = _missing(at, old, fixed, live)
    for _ in range(6):
        if least == 0:
            break
        at = after[at]
        missing = _missing(at, old, fixed, live)
        if missing < least:
            found = at
            least = missing
    cursor[rank] = after[at]
    return found  # type: ignore[no-any-return]


@_compile
def anneal(
    steps: int,
    heats: Any,
    odds: Any,
    free: Any,
    pinned: Any,
    undo: Any,
    best: Any,
    fixed: Any,
    live: Any,
    state: Any,
    rule: Any,
) -> None:
    """`steps` proposals at each heat; the best assignment without violation ends in `best`.

    Args:
        heats: falling temperatures, in energy.
        odds: 1024 values of -log(u) scaled by 2**16: a proposal that costs `delta` is taken when
            ``delta <= heat * odds[random] >> 16``.
        free: the blocks that may move; pinned: 1 for those that may not.
        undo: room for (block, old rank) pairs, twice the number of blocks long.
    """
    first, line_of, line_first, line_block = fixed[1], fixed[2], fixed[6], fixed[7]
    assign = live[0]
    movable = len(free)
    if state[HARD_EXCESS] == 0 and state[LOAD_EXCESS] == 0:
        _keep(best, live, state, rule)
    for heat in heats:
        level = 0
        for _ in range(steps):
            if rule[FOLLOW] == 1 and state[BEST_VOLUME] <= rule[LOWER]:
                return
            if state[LOAD_EXCESS] == 0:
                level += 1
            block = free[draw(state, movable)]
            old = assign[block]
            line = line_of[first[block] + draw(state, first[block + 1] - first[block])]
            rank = _target_rank(block, line, fixed, live, state)
            if rank == old:
                continue
            if _missing(block, rank, fixed, live) > 1 and draw(state, 8) != 0:
                continue
            kind = draw(state, 64)
            limit = (heat * odds[draw(state, 1024)]) >> 16
            if kind < MOVE:
                if price(block, rank, fixed, live, rule) > limit:
                    continue
                move(block, rank, fixed, live, state, rule)
            elif kind < SWAP:
                other = _partner(rank, old, fixed, live, state)
                if other < 0 or pinned[other] == 1:
                    continue
                delta = move(block, rank, fixed, live, state, rule)
                delta += price(other, old, fixed, live, rule)
                if delta > limit:
                    move(block, old, fixed, live, state, rule)
                    continue
                move(other, old, fixed, live, state, rule)
            else:
                # A whole line of a rank; for the last kind the two ranks exchange the line.
                done = 0
                delta = 0
                line = line_of[first[block] + draw(state, first[block + 1] - first[block])]
                for k in range(line_first[line], line_first[line + 1]):
                    other = line_block[k]
                    if pinned[other] == 1:
                        continue
                    if assign[other] == old:
                        undo[2 * done] = other
                        undo[2 * done + 1] = old
                        done += 1
                        delta += move(other, rank, fixed, live, state, rule)
                    elif kind == 63 and assign[other] == rank:
                        undo[2 * done] = other
                        undo[2 * done + 1] = rank
                        done += 1
                        delta += move(other, old, fixed, live, state, rule)
                if delta > limit:
                    for k in range(done - 1, -1, -1):
                        move(undo[2 * k], undo[2 * k + 1], fixed, live, state, rule)
                    continue
            if (
                state[HARD_EXCESS] == 0
                and state[LOAD_EXCESS] == 0
                and (rule[FOLLOW] == 1 or state[TOTAL] <= state[BEST_TOTAL])
            ):
                _keep(best, live, state, rule)
        # Level loads for a tenth to a third of the time: rarely means more weight, often less.
        if 10 * level < steps:
            rule[HEAVY] = rule[HEAVY] * 5 // 4
        elif 3 * level > steps and rule[HEAVY] * 4 // 5 >= rule[LIGHT]:
            rule[HEAVY] = rule[HEAVY] * 4 // 5
