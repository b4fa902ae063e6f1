"""Makes one pass by one strategy or by the best of all: candidates, cheap floors, simulated time.

"auto" simulates the tile strategy first, then every rival whose floor (the time that its busiest
rank computes or sends at the least) is below the best time so far. So a rival is never left out
that could have won, and the choice is never slower than any of them in simulated time. Within 1 %
the lower traffic wins.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ultraattn.cluster import Cluster
from ultraattn.cluster.costs import Costs
from ultraattn.errors import InputError
from ultraattn.planning.assign import Assignment, TileOptions, assign_rows, assign_tiles
from ultraattn.planning.blocks import blocks_of
from ultraattn.planning.graph import build_program
from ultraattn.planning.setting import Setting
from ultraattn.planning.tiling import Effort
from ultraattn.plans.account import account
from ultraattn.plans.check import Pass
from ultraattn.plans.plan import Bounds, PassPlan, Place
from ultraattn.plans.program import Block, Program
from ultraattn.plans.tensors import Tensor
from ultraattn.simulation import simulate_pass
from ultraattn.simulation.simulate import bound_s
from ultraattn.strategies import NAMES as RIVALS
from ultraattn.strategies import Strategy, by_name
from ultraattn.strategies.mesh import mesh_ranks

OWN = ("auto", "tile", "rows")
STRATEGIES = (*OWN, *RIVALS)
"""What ``strategy=`` takes; ``mesh`` and ``heads_ring`` also with a shape, as in mesh:2x4."""

EFFORTS = list(Effort)

TIE = 0.01
"""Simulated times within 1 % of the best count as equal (issue "Predict and choose")."""


@dataclass(frozen=True)
class Where:
    """The place of a plan, and the costs there (None where they are unknown)."""

    place: Place
    costs: Costs | None

    @staticmethod
    def of(cluster: Cluster) -> Where:
        """What planning needs of a cluster."""
        return Where(Place(cluster.name, cluster.nodes, cluster.gpus_per_node), cluster.costs)


@dataclass(frozen=True, eq=False)
class Candidate:
    """One way to run a pass, simulated."""

    label: str
    pass_plan: PassPlan
    total_bytes: int

    @property
    def time_ns(self) -> int:
        """Simulated nanoseconds."""
        assert self.pass_plan.predicted_ns is not None
        return self.pass_plan.predicted_ns


def plan_pass(
    pass_: Pass, strategy: str, made: Setting, where: Where, options: TileOptions
) -> PassPlan:
    """One pass by the strategy called `strategy`.

    Raises:
        InputError: an unknown strategy (lists the valid ones), or one that cannot serve the shape
            (says what would fit).
    """
    if strategy == "auto":
        return best_pass(pass_, made, where, options)
    if strategy in ("tile", "rows"):
        assign = assign_tiles if strategy == "tile" else assign_rows
        own = _own(pass_, strategy, made, where, assign(pass_, made, options))
        return own if options.effort is Effort.INSTANT else _timed(pass_, made, where, own)
    if strategy.partition(":")[0] not in RIVALS:
        raise InputError(f"strategy {strategy!r}: expected one of {', '.join(STRATEGIES)}")
    return _timed(pass_, made, where, _rival(pass_, by_name(strategy), made, where))


def best_pass(pass_: Pass, made: Setting, where: Where, options: TileOptions) -> PassPlan:
    """The candidate of least simulated time; says what was considered.

    Raises:
        InputError: the cluster has no costs to simulate with.
    """
    if where.costs is None:
        raise InputError(
            f"strategy 'auto' on cluster {where.place.cluster!r}, which has no costs; pass a "
            "preset or a file of `ultraattn profile`, or strategy='tile'"
        )
    found: list[Candidate] = []
    skipped: list[str] = []
    quick = dataclasses.replace(options, effort=min(options.effort, Effort.FAST, key=EFFORTS.index))
    for label, floor_ns, make in _candidates(pass_, made, where, where.costs, quick):
        if found and floor_ns > min(c.time_ns for c in found):
            skipped.append(label)
            continue
        found.append(_candidate(pass_, label, made, where, make()))
    if options.effort in (Effort.NORMAL, Effort.BEST):
        found += _searched_longer(pass_, made, where, options, found)
    least = min(c.time_ns for c in found)
    near = [c for c in found if c.time_ns <= least * (1 + TIE)]
    chosen = min(near, key=lambda c: (c.total_bytes, c.time_ns))
    notes = [*chosen.pass_plan.notes, *_report(found, skipped, _refused(made))]
    return dataclasses.replace(chosen.pass_plan, notes=tuple(notes))


def _candidate(pass_: Pass, label: str, made: Setting, where: Where, part: PassPlan) -> Candidate:
    timed = _timed(pass_, made, where, part)
    traffic = int(account(made.problem, part.program, where.place.node_of).sent.sum())
    return Candidate(label, timed, traffic)


def _searched_longer(
    pass_: Pass,
    made: Setting,
    where: Where,
    options: TileOptions,
    found: Sequence[Candidate],
) -> list[Candidate]:
    """The best quick tiles again, with the effort asked for, where tiles were best at all."""
    best = min(found, key=lambda c: c.time_ns)
    for label, variant in _variants(made, options):
        if label == best.label:
            variant = dataclasses.replace(variant, effort=options.effort)
            part = _own(pass_, label, made, where, assign_tiles(pass_, made, variant))
            return [_candidate(pass_, f"{label}, {options.effort}", made, where, part)]
    return []


def _report(
    found: Sequence[Candidate], skipped: Sequence[str], refused: Sequence[str]
) -> list[str]:
    times = sorted(found, key=lambda c: c.time_ns)
    notes = ["simulated: " + ", ".join(f"{c.label} {c.time_ns / 1e6:.3f} ms" for c in times)]
    if skipped:
        notes.append("left out, slower by their floor: " + ", ".join(skipped))
    return notes + [f"left out: {reason}" for reason in refused]


def _candidates(
    pass_: Pass, made: Setting, where: Where, costs: Costs, options: TileOptions
) -> Iterator[tuple[str, float, Callable[[], PassPlan]]]:
    """(label, floor in nanoseconds, how to make it), this system's own first."""
    for label, variant in _variants(made, options):

        def tiles(label: str = label, variant: TileOptions = variant) -> PassPlan:
            return _own(pass_, label, made, where, assign_tiles(pass_, made, variant))

        yield label, 0.0, tiles
    floors = _Floors(pass_, made, costs)
    rows = assign_rows(pass_, made, options)
    yield "rows", floors.of(rows), lambda: _own(pass_, "rows", made, where, rows)
    for rival in _rivals(made):
        groups = rival.head_groups(made.problem, made.q_layout.ranks)
        blocks = rows.blocks if groups == rows.head_groups else _blocks(made, groups)

        def build(rival: Strategy = rival, blocks: Sequence[Block] = blocks) -> PassPlan:
            return _rival(pass_, rival, made, where, blocks)

        yield rival.label, floors.of_rival(rival, blocks), build


def _variants(made: Setting, options: TileOptions) -> Iterator[tuple[str, TileOptions]]:
    """The tile strategy as asked for, then with other head ranges and a looser cap, searched less.

    The planner weighs load against volume in seconds: a looser cap moves less.
    """
    yield "tile", options
    if options.effort is Effort.INSTANT:
        return
    quick = dataclasses.replace(options, effort=Effort.FAST)
    if options.head_groups is None and made.problem.heads > 1:
        yield "tile, one head range", dataclasses.replace(quick, head_groups=1)
    if options.load_cap is None:
        yield "tile, cap 1.25", dataclasses.replace(quick, load_cap=1.25)


def _rivals(made: Setting) -> list[Strategy]:
    """Every rival that can serve, each shape apart; rings go by the name of their layout."""
    found: list[Strategy] = []
    ring = {"zigzag": "zigzag", "striped": "stripe"}.get(made.q_layout.name, "ring")
    for rival in RIVALS.values():
        if rival.name in ("ring", "zigzag", "stripe") and rival.name != ring:
            continue
        found += rival.variants(made.problem, made.q_layout.ranks)
    return found


def _refused(made: Setting) -> list[str]:
    """Why rivals cannot serve at all."""
    ranks = made.q_layout.ranks
    return [
        reason
        for rival in RIVALS.values()
        if not rival.variants(made.problem, ranks)
        and (reason := rival.refusal(made.problem, ranks)) is not None
    ]


@dataclass(frozen=True)
class _Floors:
    """The least time that a candidate can take, from its loads and traffic alone."""

    pass_: Pass
    made: Setting
    costs: Costs

    def of(self, assignment: Assignment) -> float:
        """Nanoseconds: its busiest rank at peak rate, and its busiest link, in bytes."""
        traffic = assignment.bounds.max_volume if assignment.bounds.units == "bytes" else 0.0
        return max(self._compute(assignment.blocks, assignment.ranks), self._links(traffic))

    def of_rival(self, rival: Strategy, blocks: Sequence[Block]) -> float:
        """Nanoseconds; 0 where nothing simple is known."""
        if rival.head_lanes:
            return bound_s(str(self.pass_), self.made.problem, self._ranks, self.costs) * 1e9
        if rival.shaped:
            shape = rival.resolved(self.made.problem, self._ranks)
            ranks = mesh_ranks(blocks, self.made.q_layout, self.made.kv_layout, shape)
            return self._compute(blocks, ranks)
        owners = self.made.q_layout.owners
        compute = self._compute(blocks, [owners[b.q_chunk] for b in blocks])
        problem = self.made.problem
        row = sum(problem.widths.row_bytes(t) for t in (Tensor.K, Tensor.V))
        # Whoever holds all keys in the end has received all but its own.
        local = max(self.made.kv_layout.local_tokens(rank) for rank in range(self._ranks))
        return max(compute, self._links((problem.kv_len - local) * problem.kv_heads * row))

    @property
    def _ranks(self) -> int:
        return self.made.q_layout.ranks

    def _compute(self, blocks: Sequence[Block], ranks: Sequence[int]) -> float:
        load = np.zeros(self._ranks, dtype=np.int64)
        weights = np.fromiter((b.weight for b in blocks), dtype=np.int64, count=len(blocks))
        np.add.at(load, np.array(ranks, dtype=np.int64), weights)
        p = self.made.problem
        factor = self.costs.width_factor(p.head_dim, p.value_dim, p.dtype)
        return float(load.max(initial=0)) * factor / self.costs.peak(str(self.pass_)) * 1e9

    def _links(self, bytes_: float) -> float:
        fastest = max(self.costs.inside.bytes_per_s, self.costs.between.bytes_per_s)
        return bytes_ / fastest * 1e9


def _blocks(made: Setting, groups: int) -> list[Block]:
    return blocks_of(made.grid, made.problem.heads, groups)


def _program(pass_: Pass, made: Setting, where: Where, assignment: Assignment) -> Program:
    return build_program(
        pass_,
        made.problem,
        made.q_layout,
        made.kv_layout,
        where.place.node_of,
        assignment.blocks,
        assignment.ranks,
    )


def _own(pass_: Pass, label: str, made: Setting, where: Where, assignment: Assignment) -> PassPlan:
    """A pass of this system: blocks on ranks, by direct transfers."""
    program = _program(pass_, made, where, assignment)
    name = label.partition(",")[0]
    return PassPlan(name, assignment.head_groups, assignment.bounds, assignment.notes, program)


def _rival(
    pass_: Pass,
    rival: Strategy,
    made: Setting,
    where: Where,
    blocks: Sequence[Block] | None = None,
) -> PassPlan:
    """A rival's pass; its volume is what it moves, relays included."""
    groups = rival.head_groups(made.problem, made.q_layout.ranks)
    if blocks is None:
        refusal = rival.refusal(made.problem, made.q_layout.ranks)
        if refusal is not None:
            raise InputError(refusal)
        blocks = _blocks(made, groups)
    node_of = where.place.node_of
    program = rival.build(pass_, made.problem, made.q_layout, made.kv_layout, node_of, blocks)
    volume = float(account(made.problem, program, node_of).max_volume)
    return PassPlan(rival.label, groups, Bounds(volume, 0.0, volume == 0), (), program)


def _timed(pass_: Pass, made: Setting, where: Where, part: PassPlan) -> PassPlan:
    """With its simulated time, in whole nanoseconds, where costs are known."""
    if where.costs is None:
        return part
    simulated = simulate_pass(
        pass_,
        made.problem,
        made.q_layout,
        made.kv_layout,
        where.place.node_of,
        part.program,
        where.costs,
        least_bytes=part.bounds.lower_bound if part.bounds.units == "bytes" else 0.0,
    )
    return dataclasses.replace(part, predicted_ns=round(simulated.makespan_s * 1e9))
