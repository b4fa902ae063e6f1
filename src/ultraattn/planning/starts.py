"""Turns a tiling problem into structured assignments: rows, columns, meshes, and heads x meshes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ultraattn.planning.ledger import NO_RANK, Ints, TilingProblem, Value, evaluate
from ultraattn.planning.packing import pack
from ultraattn.planning.repair import repair


@dataclass(frozen=True, eq=False)
class Found:
    """An assignment within the cap, its value and where it comes from."""

    value: Value
    assignment: Ints
    origin: str


@dataclass(frozen=True, eq=False)
class Start:
    """A named assignment: int64 (G, Pq, Pk), -1 where there is no block."""

    name: str
    assignment: Ints


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    return [d for d in range(1, number + 1) if number % d == 0]


def row_owner(problem: TilingProblem) -> Start:
    """Every block on the owner of its query chunk."""
    where = np.broadcast_to(problem.q_owner[None, :, None], problem.weight.shape)
    return Start("rows", np.where(problem.weight > 0, where, NO_RANK))


def column_owner(problem: TilingProblem) -> Start:
    """Every block on the owner of its key chunk."""
    where = np.broadcast_to(problem.kv_owner[None, None, :], problem.weight.shape)
    return Start("columns", np.where(problem.weight > 0, where, NO_RANK))


def mesh(problem: TilingProblem, head_parts: int, height: int, width: int) -> Start:
    """Ranks as a (head part, height, width) mesh: (h, a, b) takes heads h, row group a, columns b.

    Row group a holds the query chunks of the ranks (., a, .), column group b the key chunks of the
    ranks (., ., b), so every rank uses its own rows and its own columns.
    """
    ranges = problem.weight.shape[0]
    part = height * width
    head = np.arange(ranges) * head_parts // ranges
    row = problem.q_owner % part // width
    column = problem.kv_owner % width
    where = head[:, None, None] * part + row[None, :, None] * width + column[None, None, :]
    name = (
        f"mesh {height} x {width}"
        if head_parts == 1
        else f"heads {head_parts} x {height} x {width}"
    )
    return Start(name, np.where(problem.weight > 0, where, NO_RANK))


def structured(problem: TilingProblem) -> Iterator[Start]:
    """Rows, columns, and every mesh of every number of head parts the head ranges allow."""
    yield row_owner(problem)
    yield column_owner(problem)
    ranges = problem.weight.shape[0]
    for head_parts in divisors(problem.ranks):
        if ranges % head_parts:
            continue
        part = problem.ranks // head_parts
        for height in divisors(part):
            yield mesh(problem, head_parts, height, part // height)


def _pin(problem: TilingProblem, assignment: Ints, pinned: Ints) -> Ints:
    ranks = assignment[problem.weight > 0]
    return problem.spread(np.where(pinned != NO_RANK, pinned, ranks))


def structured_starts(
    problem: TilingProblem, pinned: Ints, repairs: int, further: tuple[Start, ...] = ()
) -> list[Found]:
    """Structured assignments within the cap, some after repair, the best first; or none at all."""
    found: list[Found] = []
    over: list[Found] = []
    seen: set[bytes] = set()
    for start in (*further, *structured(problem)):
        assignment = _pin(problem, start.assignment, pinned)
        if assignment.tobytes() in seen:
            continue
        seen.add(assignment.tobytes())
        ledger = evaluate(problem, assignment)
        kept = found if ledger.max_load <= problem.cap else over
        kept.append(Found(ledger.value, assignment, start.name))
    over.sort(key=lambda s: (s.value[0] * s.value[2], s.value))
    for uneven in over[:repairs]:
        fixed = repair(problem, uneven.assignment, pinned)
        if fixed is not None:
            name = f"{uneven.origin}, levelled"
            found.append(Found(evaluate(problem, fixed).value, fixed, name))
    if not found:
        packed = pack(problem, problem.cap, pinned)
        if packed is None:
            return []
        assignment = problem.spread(packed)
        found.append(Found(evaluate(problem, assignment).value, assignment, "packing"))
    return sorted(found, key=lambda start: start.value)
