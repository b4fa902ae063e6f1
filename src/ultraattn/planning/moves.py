"""Turns a move of one block to another rank into its cost, and makes it: the inner loop's core.

Integers only, and one source for both ways to run it: compiled where numba is installed, as plain
Python over lists where it is not. Both take the same decisions, so both give the same plan. The
volumes that a step changes are those of at most four ranks, so a step costs the same on any grid.

A rank's energy, for a target volume T and a load cap, with (x) for max(0, x):

    hard ((recv - T) + (send - T)) + square ((recv - T)^2 + (send - T)^2)
        + heavy (load - cap) / unit + soft recv

`hard` with T one step below the best volume known asks for a better assignment and for nothing
else. `square` with the mean volume for T evens the volumes out, the largest first, and so lowers
all of them together: it is what finds small volumes where some ranks own much busier chunks than
others.

Arrays are handed on one by one, and those that hold numbers of things have 32 bits, so that more of
them stay near.

Lines of block b are line_of[first[b]:first[b + 1]], its row and its columns. A line has an owner
and sizes that go in and out. A rank's blocks are a ring (after, before) that cursor points into, -1
when empty; counts[line * ranks + rank] counts a rank's blocks of a line, and one more for its
owner, who always has it.
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


# Without counting references (`_nrt`), which took half of the time: whoever calls a loop holds all
# of its arrays, and nothing is allocated inside.
_OPTIONS: dict[str, Any] = {"nogil": True, "_nrt": False}


def compiled(function: F) -> F:
    """`function` compiled, or as it is where numba is missing."""
    if not COMPILED:
        return function
    return _njit(cache=True, **_OPTIONS)(function)  # type: ignore[no-any-return]


def inlined(function: F) -> F:
    """`function` compiled into its callers: a call would pass each array as seven numbers."""
    if not COMPILED:
        return function
    return _njit(forceinline=True, **_OPTIONS)(function)  # type: ignore[no-any-return]


# Places in `state`, the scalars that change during a run.
RANDOM, OVER_GOAL, LOAD_EXCESS, TOTAL = 0, 1, 2, 3  # OVER_GOAL: receives and sends over the goal
BEST_VOLUME, BEST_TOTAL, BEST_LOAD, IMPROVED = 4, 5, 6, 7
STATE_SIZE = 8

# Places in `rule`, the scalars that do not, but for TARGET, GOAL and HEAVY.
TARGET, CAP, HARD, HEAVY, SOFT, LOAD_SHIFT, SIZE_UNIT, LOWER = 0, 1, 2, 3, 4, 5, 6, 7
FOLLOW = 8  # 1: lower the goal with every solution; 0: keep it and lower the total
LIGHT = 9  # the least HEAVY may become
GOAL = 10  # the largest volume that counts as a solution
SQUARE, SIZE_SHIFT = 11, 12  # weight of the squares; sizes are that many bits coarser in them
LINES = 13  # of 64 proposals, those that move a whole line of a rank
RULE_SIZE = 14

MOST = 1 << 18
"""Largest volume over the target that is squared, in coarse sizes: the energy keeps to 64 bits."""


@inlined
def draw(state: Any, count: int) -> int:
    """A number below `count`: xorshift of 32 bits, the same on every machine."""
    x = state[RANDOM]
    x ^= (x << 13) & 0xFFFFFFFF
    x ^= x >> 17
    x ^= (x << 5) & 0xFFFFFFFF
    state[RANDOM] = x
    return (x * count) >> 32  # type: ignore[no-any-return]


@inlined
def _steep(volume: int, rule: Any) -> int:
    """The energy of a receive or a send that is so far over the target."""
    if volume <= 0:
        return 0
    coarse = min(volume >> rule[SIZE_SHIFT], MOST)
    return volume * rule[HARD] + coarse * coarse * rule[SQUARE]  # type: ignore[no-any-return]


@inlined
def _over(rank: int, more_recv: int, more_send: int, recv: Any, send: Any, rule: Any) -> int:
    """The change of energy of a rank's volumes if they changed so."""
    r, s = recv[rank] - rule[TARGET], send[rank] - rule[TARGET]
    change = _steep(r + more_recv, rule) - _steep(r, rule)
    return change + _steep(s + more_send, rule) - _steep(s, rule)


@inlined
def price(
    block: int,
    rank: int,
    weight: Any,
    first: Any,
    line_of: Any,
    owner: Any,
    size_in: Any,
    size_out: Any,
    assign: Any,
    counts: Any,
    recv: Any,
    send: Any,
    load: Any,
    rule: Any,
) -> int:
    """The change of energy if a block moved to a rank.

    The columns of a block have one owner, so that at most four ranks change: the old and the new
    one, the row's owner and the columns' owner.
    """
    ranks = len(recv)
    old = assign[block]
    k = first[block]
    line = line_of[k]
    row_owner = owner[line]
    column_owner = row_owner
    # What the old rank drops, and the new one adds: of the row, then of the columns.
    drop_in = drop_out = add_in = add_out = 0
    if counts[line * ranks + old] == 1:
        drop_in, drop_out = size_in[line], size_out[line]
    if counts[line * ranks + rank] == 0:
        add_in, add_out = size_in[line], size_out[line]
    row_recv, row_send = add_out - drop_out, add_in - drop_in
    old_recv, old_send, new_recv, new_send = -drop_in, -drop_out, add_in, add_out
    drop_in = drop_out = add_in = add_out = 0
    for at in range(k + 1, first[block + 1]):
        line = line_of[at]
        column_owner = owner[line]
        if counts[line * ranks + old] == 1:
            drop_in += size_in[line]
            drop_out += size_out[line]
        if counts[line * ranks + rank] == 0:
            add_in += size_in[line]
            add_out += size_out[line]
    column_recv, column_send = add_out - drop_out, add_in - drop_in
    old_recv -= drop_in
    old_send -= drop_out
    new_recv += add_in
    new_send += add_out
    delta = 0
    if old_recv != 0 or old_send != 0 or new_recv != 0 or new_send != 0:
        total = old_recv + old_send + new_recv + new_send
        over = 0
        if column_owner == row_owner:
            row_recv += column_recv
            row_send += column_send
        elif column_owner == old:
            old_recv += column_recv
            old_send += column_send
        elif column_owner == rank:
            new_recv += column_recv
            new_send += column_send
        else:
            over += _over(column_owner, column_recv, column_send, recv, send, rule)
        if row_owner == old:
            old_recv += row_recv
            old_send += row_send
        elif row_owner == rank:
            new_recv += row_recv
            new_send += row_send
        else:
            over += _over(row_owner, row_recv, row_send, recv, send, rule)
        over += _over(old, old_recv, old_send, recv, send, rule)
        over += _over(rank, new_recv, new_send, recv, send, rule)
        delta = over + total * rule[SOFT]
    heavy, shift = rule[HEAVY], rule[LOAD_SHIFT]
    more = weight[block]
    before = load[old] - rule[CAP]
    if before > 0:
        delta += ((max(before - more, 0) * heavy) >> shift) - ((before * heavy) >> shift)
    before = load[rank] - rule[CAP]
    if before + more > 0:
        delta += (((before + more) * heavy) >> shift) - ((max(before, 0) * heavy) >> shift)
    return delta


@inlined
def _shift(
    rank: int, more_recv: int, more_send: int, recv: Any, send: Any, state: Any, goal: int
) -> None:
    """Changes a rank's volumes."""
    r, s = recv[rank], send[rank]
    recv[rank] = r + more_recv
    send[rank] = s + more_send
    state[OVER_GOAL] += int(r + more_recv > goal) - int(r > goal)
    state[OVER_GOAL] += int(s + more_send > goal) - int(s > goal)


@inlined
def move(
    block: int,
    rank: int,
    weight: Any,
    first: Any,
    line_of: Any,
    owner: Any,
    size_in: Any,
    size_out: Any,
    assign: Any,
    after: Any,
    before: Any,
    cursor: Any,
    counts: Any,
    recv: Any,
    send: Any,
    load: Any,
    state: Any,
    rule: Any,
) -> None:
    """Puts a block on a rank."""
    ranks = len(recv)
    old = assign[block]
    goal, cap = rule[GOAL], rule[CAP]
    assign[block] = rank
    following = after[block]
    if following == block:
        cursor[old] = -1
    else:
        leading = before[block]
        after[leading] = following
        before[following] = leading
        if cursor[old] == block:
            cursor[old] = following
    at = cursor[rank]
    if at < 0:
        cursor[rank] = block
        after[block] = block
        before[block] = block
    else:
        leading = before[at]
        after[block] = at
        before[block] = leading
        after[leading] = block
        before[at] = block
    more = weight[block]
    a, b = load[old] - cap, load[rank] - cap
    load[old] -= more
    load[rank] += more
    state[LOAD_EXCESS] += max(a - more, 0) - max(a, 0) + max(b + more, 0) - max(b, 0)
    for k in range(first[block], first[block + 1]):
        line = line_of[k]
        here, there = line * ranks + old, line * ranks + rank
        counts[here] -= 1
        counts[there] += 1
        come, go = size_in[line], size_out[line]
        if counts[here] == 0:
            _shift(old, -come, -go, recv, send, state, goal)
            _shift(owner[line], -go, -come, recv, send, state, goal)
            state[TOTAL] -= come + go
        if counts[there] == 1:
            _shift(rank, come, go, recv, send, state, goal)
            _shift(owner[line], go, come, recv, send, state, goal)
            state[TOTAL] += come + go
