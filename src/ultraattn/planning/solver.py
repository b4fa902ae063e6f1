"""Turns a small tiling problem into a proven assignment, or a better bound, with CP-SAT.

One worker, a fixed seed and deterministic time: the same answer on every machine. OR-Tools is
imported where it is used, since only proofs need it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ultraattn.planning.ledger import NO_RANK, Ints, TilingProblem, Value, evaluate

if TYPE_CHECKING:
    from ortools.sat.python import cp_model


@dataclass(frozen=True, eq=False)
class Proof:
    """What the solver found: an assignment no worse than the hint, and a bound on the volume."""

    value: Value
    assignment: Ints
    lower_bound: int


@dataclass(frozen=True, eq=False)
class _Model:
    model: cp_model.CpModel
    on: dict[tuple[int, int], cp_model.IntVar]
    needs: dict[tuple[int, int], cp_model.IntVar]
    volume: cp_model.IntVar
    total: cp_model.LinearExpr | int


def _lines(problem: TilingProblem) -> tuple[list[list[int]], Ints, Ints, Ints]:
    """The lines of every block (rows first, then columns), and owner, in, out of every line."""
    ranges, rows, columns = problem.weight.shape
    lines = [
        [g * rows + i, *(ranges * rows + s * columns + j for s in problem.segments[g])]
        for g, i, j in problem.blocks.tolist()
    ]
    owner = np.concatenate(
        [np.tile(problem.q_owner, ranges), np.tile(problem.kv_owner, len(problem.col_in))]
    )
    size_in = np.concatenate([problem.row_in.ravel(), problem.col_in.ravel()])
    size_out = np.concatenate([problem.row_out.ravel(), problem.col_out.ravel()])
    return lines, owner, size_in // problem.size_unit, size_out // problem.size_unit


def _build(problem: TilingProblem, pinned: Ints, bound: int, upper: int) -> _Model:
    """The integer program; volumes are in units of `problem.size_unit`."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    lines, owner, size_in, size_out = _lines(problem)
    ranks = range(problem.ranks)

    # x[b, r] = 1: block b is on rank r. Every block is on exactly one.
    on = {(b, r): model.new_bool_var(f"x{b}_{r}") for b in range(len(lines)) for r in ranks}
    for b in range(len(lines)):
        model.add_exactly_one(on[b, r] for r in ranks)
        if pinned[b] != NO_RANK:
            model.add(on[b, int(pinned[b])] == 1)

    # y[l, r] = 1: rank r needs line l of another rank. x[b, r] implies y[l, r] for b's lines.
    needs = {
        (line, r): model.new_bool_var(f"y{line}_{r}")
        for line in sorted({line for of_block in lines for line in of_block})
        for r in ranks
        if r != owner[line]
    }
    for b, of_block in enumerate(lines):
        for line in of_block:
            for r in ranks:
                if r != owner[line]:
                    model.add_implication(on[b, r], needs[line, r])

    # sum of w[b] x[b, r] over b <= cap.
    weight = problem.block_weight.tolist()
    for r in ranks:
        model.add(sum(w * on[b, r] for b, w in enumerate(weight)) <= problem.cap)

    # recv[r] and send[r] (module ledger) are at most V; minimise V.
    volume = model.new_int_var(bound, upper, "V")
    recv: list[list[cp_model.LinearExpr]] = [[] for _ in ranks]
    send: list[list[cp_model.LinearExpr]] = [[] for _ in ranks]
    for (line, r), need in needs.items():
        own, come, go = int(owner[line]), int(size_in[line]), int(size_out[line])
        if come:
            recv[r].append(come * need)
            send[own].append(come * need)
        if go:
            send[r].append(go * need)
            recv[own].append(go * need)
    for terms in (*recv, *send):
        model.add(sum(terms) <= volume)
    total = sum(term for terms in recv for term in terms)
    return _Model(model, on, needs, volume, total)


def _hint(model: _Model, problem: TilingProblem, ranks: Ints, volume: int) -> None:
    lines = _lines(problem)[0]
    needed = {(line, int(ranks[b])) for b, of in enumerate(lines) for line in of}
    model.model.clear_hints()  # type: ignore[no-untyped-call]
    for (b, r), variable in model.on.items():
        model.model.add_hint(variable, int(ranks[b] == r))
    for key, variable in model.needs.items():
        model.model.add_hint(variable, int(key in needed))
    model.model.add_hint(model.volume, volume)


def prove(
    problem: TilingProblem,
    pinned: Ints,
    start: Ints,
    bound: int,
    deterministic_time: float,
    *,
    traffic: bool = True,
) -> Proof:
    """Improves or proves an assignment within a deterministic time.

    Args:
        problem: with a cap that can be met.
        pinned: the rank of every block (in their order) that is fixed, -1 for the others.
        start: an assignment within the cap, int64 (G, Pq, Pk): hint and upper bound.
        bound: a proven lower bound on the volume.
        deterministic_time: limit in CP-SAT's own machine-independent unit (about a second).
        traffic: once the volume is proved, also minimise the total traffic.
    """
    from ortools.sat.python import cp_model

    unit = problem.size_unit
    value = evaluate(problem, start).value
    best = start
    model = _build(problem, pinned, -(-bound // unit), value[0] // unit)

    def run(limit: float) -> tuple[cp_model.CpSolverStatus, float]:
        nonlocal best, value
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 0
        solver.parameters.linearization_level = 0
        solver.parameters.max_deterministic_time = limit
        _hint(model, problem, best[problem.weight > 0], value[0] // unit)
        status = solver.solve(model.model)
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            ranks = np.full(len(problem.blocks), NO_RANK, dtype=np.int64)
            for (b, r), variable in model.on.items():
                if solver.boolean_value(variable):
                    ranks[b] = r
            found = problem.spread(ranks)
            reached = evaluate(problem, found).value
            if reached < value:
                best, value = found, reached
        return status, solver.best_objective_bound

    model.model.minimize(model.volume)
    status, lowest = run(deterministic_time)
    proved = max(bound, min(value[0], round(lowest) * unit))
    if status == cp_model.OPTIMAL:
        proved = value[0]
    if traffic and proved == value[0]:
        model.model.add(model.volume * unit <= value[0])
        model.model.minimize(model.total)
        run(deterministic_time / 2)
    return Proof(value, best, proved)


def refuted(problem: TilingProblem, pinned: Ints, volume: int, deterministic_time: float) -> bool:
    """Whether no assignment within the cap has a volume of at most `volume`.

    A yes is a proof; a no only says that none was found in time. Without an objective the solver
    spends all of its time on the one question: global_local over 8 ranks and 16 chunks takes 40
    units of deterministic time, where minimising takes longer.
    """
    from ortools.sat.python import cp_model

    limit = volume // problem.size_unit
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.linearization_level = 0
    solver.parameters.max_deterministic_time = deterministic_time
    model = _build(problem, pinned, 0, limit).model
    return bool(solver.solve(model) == cp_model.INFEASIBLE)
