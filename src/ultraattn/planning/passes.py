"""Makes one pass by one named strategy: its assignment, its program, its simulated time."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from ultraattn.cluster import Cluster
from ultraattn.cluster.costs import Costs
from ultraattn.errors import InputError
from ultraattn.planning.arrange import Arranged, Arranger, fastest
from ultraattn.planning.assign import Assignment, TileOptions, assign_rows, assign_tiles
from ultraattn.planning.graph import build_program
from ultraattn.planning.setting import Setting
from ultraattn.planning.tiling import Effort
from ultraattn.plans.account import account
from ultraattn.plans.check import Pass
from ultraattn.plans.plan import Bounds, PassPlan, Place
from ultraattn.plans.program import Program
from ultraattn.simulation import simulate_pass
from ultraattn.strategies import NAMES as RIVALS
from ultraattn.strategies import Strategy, by_name

OWN = ("auto", "tile", "rows")
STRATEGIES = (*OWN, *RIVALS)
"""What ``strategy=`` takes; ``mesh`` and ``heads_ring`` also with a shape, as in mesh:2x4."""


@dataclass(frozen=True)
class Where:
    """The place of a plan, and the costs there (None where they are unknown)."""

    place: Place
    costs: Costs | None

    @staticmethod
    def of(cluster: Cluster) -> Where:
        """What planning needs of a cluster."""
        return Where(Place(cluster.name, cluster.nodes, cluster.gpus_per_node), cluster.costs)


def plan_pass(
    pass_: Pass, strategy: str, made: Setting, where: Where, options: TileOptions
) -> PassPlan:
    """One pass by the strategy called `strategy`, other than auto.

    Raises:
        InputError: an unknown strategy (lists the valid ones), or one that cannot serve the shape
            (says what would fit).
    """
    if strategy in ("tile", "rows"):
        assign = assign_tiles if strategy == "tile" else assign_rows
        assignment = assign(pass_, made, options)
        own = own_pass(pass_, strategy, made, where, assignment)
        if options.effort is Effort.INSTANT:
            return own
        if strategy == "rows":
            return timed(pass_, made, where, own)
        return arranged(pass_, made, where, own, assignment, options.effort)
    if strategy.partition(":")[0] not in RIVALS:
        raise InputError(f"strategy {strategy!r}: expected one of {', '.join(STRATEGIES)}")
    part = rival_pass(pass_, by_name(strategy), made, where)
    return timed(pass_, made, where, with_volume(made, where, part))


def own_pass(
    pass_: Pass,
    name: str,
    made: Setting,
    where: Where,
    assignment: Assignment,
    program: Program | None = None,
) -> PassPlan:
    """A pass of this system: blocks on ranks, by direct transfers; `program` where it is known."""
    program = program or build_program(
        pass_,
        made.problem,
        made.q_layout,
        made.kv_layout,
        where.place.node_of,
        assignment.blocks,
        assignment.ranks,
    )
    return PassPlan(name, assignment.head_groups, assignment.bounds, assignment.notes, program)


def rival_pass(
    pass_: Pass,
    rival: Strategy,
    made: Setting,
    where: Where,
    program: Program | None = None,
) -> PassPlan:
    """A rival's pass, whose volume `with_volume` adds; `program` where it is known.

    Raises:
        InputError: the rival cannot serve the shape; says what would fit.
    """
    ranks = made.q_layout.ranks
    refusal = rival.refusal(made.problem, ranks)
    if refusal is not None:
        raise InputError(refusal)
    groups = rival.head_groups(made.problem, ranks)
    if program is None:
        program = rival.build(
            pass_,
            made.problem,
            made.q_layout,
            made.kv_layout,
            where.place.node_of,
            made.blocks(groups),
        )
    return PassPlan(rival.label, groups, Bounds(0.0, 0.0, proved=False), (), program)


def arranged(
    pass_: Pass,
    made: Setting,
    where: Where,
    part: PassPlan,
    assignment: Assignment,
    effort: Effort,
    quick: Sequence[Arranged] = (),
) -> PassPlan:
    """A pass of this system with the launches and the order of least simulated time.

    `part` is the pass by arrival; `quick` what `quickly_arranged` found of it, where that is known.
    """
    if where.costs is None:
        return part
    arranger = _arranger(pass_, made, where, where.costs)
    found = list(quick) or arranger.quick(part.program, effort)
    if quick and effort is not Effort.FAST:
        found += arranger.ordered(found, effort, effort)
    found += arranger.deep(assignment.blocks, assignment.ranks, found, effort)
    return as_arranged(part, found)


def quickly_arranged(
    pass_: Pass, made: Setting, where: Where, part: PassPlan, effort: Effort
) -> list[Arranged]:
    """The arrangements of a pass that are quick to make: `Arranger.quick` without the solver."""
    assert where.costs is not None
    return _arranger(pass_, made, where, where.costs).quick(part.program, effort, Effort.FAST)


def as_arranged(part: PassPlan, found: Sequence[Arranged]) -> PassPlan:
    """The pass in the fastest of its arrangements, with what a reader should know of it."""
    best = fastest(found)
    return dataclasses.replace(
        part,
        program=best.program,
        predicted_ns=best.time_ns,
        notes=(*part.notes, *best.notes),
    )


def _arranger(pass_: Pass, made: Setting, where: Where, costs: Costs) -> Arranger:
    return Arranger(pass_, made.problem, made.q_layout, made.kv_layout, where.place.node_of, costs)


def with_volume(made: Setting, where: Where, part: PassPlan) -> PassPlan:
    """A rival's pass with the volume of its busiest rank, relays included."""
    volume = float(account(made.problem, part.program, where.place.node_of).max_volume)
    return dataclasses.replace(part, bounds=Bounds(volume, 0.0, volume == 0))


def timed(pass_: Pass, made: Setting, where: Where, part: PassPlan) -> PassPlan:
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
