"""Turns the state of a run into proposals: a rank for a block, and a block to exchange for it.

Both ways to run it as in `moves`: compiled, or as plain Python over lists.
"""

from __future__ import annotations

from typing import Any

from ultraattn.planning.moves import draw, inlined


@inlined
def missing(block: int, rank: int, ranks: int, first: Any, line_of: Any, counts: Any) -> int:
    """How many lines of a block a rank would have to fetch for it."""
    missing = 0
    for k in range(first[block], first[block + 1]):
        if counts[line_of[k] * ranks + rank] == 0:
            missing += 1
    return missing


@inlined
def target_rank(
    block: int,
    line: int,
    first: Any,
    line_of: Any,
    owner: Any,
    line_first: Any,
    line_block: Any,
    assign: Any,
    counts: Any,
    ranks: int,
    state: Any,
) -> int:
    """A rank to propose for a block: one that has its line, the better of a few; or any."""
    way = draw(state, 32)
    if way < 2:
        return draw(state, ranks)
    if way < 7:
        return owner[line]  # type: ignore[no-any-return]
    begin = line_first[line]
    span = line_first[line + 1] - begin
    rank = assign[line_block[begin + draw(state, span)]]
    if way < 12:
        return rank  # type: ignore[no-any-return]
    for _ in range(4):
        if rank != assign[block] and missing(block, rank, ranks, first, line_of, counts) == 0:
            return rank  # type: ignore[no-any-return]
        rank = assign[line_block[begin + draw(state, span)]]
    return rank  # type: ignore[no-any-return]


@inlined
def partner(
    rank: int,
    old: int,
    first: Any,
    line_of: Any,
    after: Any,
    cursor: Any,
    counts: Any,
    ranks: int,
    state: Any,
) -> int:
    """A block of `rank` to give to `old` in exchange: of a few, the one that needs least; or -1."""
    at = cursor[rank]
    if at < 0:
        return -1
    for _ in range(draw(state, 8)):
        at = after[at]
    found = at
    least = missing(at, old, ranks, first, line_of, counts)
    for _ in range(6):
        if least == 0:
            break
        at = after[at]
        needs = missing(at, old, ranks, first, line_of, counts)
        if needs < least:
            found = at
            least = needs
    cursor[rank] = after[at]
    return found  # type: ignore[no-any-return]
