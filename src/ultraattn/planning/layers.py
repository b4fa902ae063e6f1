"""Plans passes in layers, nodes first: two-level assignments over gateways, the best by simulation.

Sketches (`two_levels`) say which assignments and which layouts are worth building; their programs
(`relays`) are simulated, and the fastest is tried with other sizes of messages and launches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ultraattn.cluster.costs import Costs
from ultraattn.planning.assign import MOST_CELLS, Assignment, TileOptions, assign_tiles, bounded
from ultraattn.planning.blocks import blocks_of, head_ranges
from ultraattn.planning.floors import Columns, Floors
from ultraattn.planning.ledger import NO_RANK, evaluate
from ultraattn.planning.passes import Where, arranged, own_pass, plan_pass, timed
from ultraattn.planning.relays import How, build_relayed
from ultraattn.planning.routes import Nodes
from ultraattn.planning.setting import Setting
from ultraattn.planning.sizes import SizedProblem, Units, sized_problem
from ultraattn.planning.tiling import Effort
from ultraattn.planning.two_levels import Levels, Sketch, sketches
from ultraattn.plans.check import Pass
from ultraattn.plans.plan import Bounds, PassPlan, Place
from ultraattn.simulation import simulate_pass

BUILT = {Effort.INSTANT: 0, Effort.FAST: 2, Effort.NORMAL: 3, Effort.BEST: 8}
"""Sketches of each pass and layout that are built."""
LAYOUTS = {Effort.INSTANT: 0, Effort.FAST: 1, Effort.NORMAL: 2, Effort.BEST: 4}
"""Layouts over which sketches are built."""
NEAR = 1.1
"""Layouts whose first sketches take so many times the best are not looked into."""
NEAR_ARRANGED = 1.25
"""Layers that take so many times what one level takes arranged are not arranged themselves."""
NEAR_OF_MANY = 1.03
"""Over many ranks, layouts whose sketches seem to take so many times the best are left out."""
MANY_RANKS, BUILT_OF_MANY = 16, 2
"""Beyond so many ranks only so many sketches are built, and tiles of one level are not searched."""
REFINED = {Effort.INSTANT: 0, Effort.FAST: 4, Effort.NORMAL: 8, Effort.BEST: 40}
"""Sketches of each pass and layout whose launches are looked at."""
FIRST = How(grouped=True)
"""How messages are put together at first; the fastest sketches are tried in other ways too."""
SHORT = 12
"""Messages between nodes that take less than so many start-ups go together as well."""
FEW_NODES = 2
"""With so many nodes waves are cut: else nothing overlaps with the only one."""
BLOCKS = 20_000
"""Blocks of all programs of a pass together: fewer are built where each has many."""


@dataclass(frozen=True, eq=False)
class Layered:
    """One pass, planned in layers and simulated."""

    sketch: Sketch
    assignment: Assignment
    part: PassPlan

    @property
    def label(self) -> str:
        """For notes."""
        return self.sketch.name


def serves(place: Place, costs: Costs | None, options: TileOptions) -> bool:
    """Whether there are layers to plan in, and costs to choose by."""
    return (
        costs is not None
        and place.nodes > 1
        and place.gpus_per_node > 1
        and options.effort is not Effort.INSTANT
        and options.units is Units.BYTES
        and not options.pin_diagonal
    )


def sketched(
    made: Setting, place: Place, costs: Costs, options: TileOptions
) -> tuple[list[Sketch], ...]:
    """Two-level assignments of both passes, not built, those that seem fastest first."""
    nodes = Nodes.of(place.node_of)
    return tuple(
        sketches(
            Levels(pass_, made, nodes, _sized(pass_, made, options, 1).tiling),
            costs,
            options.effort,
            _head_groups(made, options),
            REFINED[options.effort],
        )
        for pass_ in Pass
    )


def seconds_of(found: tuple[list[Sketch], ...]) -> float:
    """Of both passes, roughly."""
    return sum(each[0].seconds if each else 0.0 for each in found)


def layered(
    settings: Sequence[Setting], place: Place, costs: Costs, options: TileOptions
) -> list[tuple[list[Layered], ...]]:
    """For each setting and pass what was built, the fastest first; nothing where it seems slow.

    The first sketch of each pass tells which layouts get more of them built.
    """
    rough = [sketched(made, place, costs, options) for made in settings]
    order = sorted(range(len(settings)), key=lambda i: (seconds_of(rough[i]), i))
    makers = {
        index: [
            _Maker(pass_, settings[index], place, costs, options, found)
            for pass_, found in zip(Pass, rough[index], strict=True)
        ]
        for index in _promising(order, rough, options.effort, place.ranks)
    }
    firsts = {index: [maker.first() for maker in two] for index, two in makers.items()}
    times = {i: sum(_least(built) for built in two) for i, two in firsts.items()}
    near = min(times.values(), default=np.inf) * NEAR
    out: list[tuple[list[Layered], ...]] = []
    for index in range(len(settings)):
        built = firsts.get(index, [[] for _ in Pass])
        if index in times and times[index] <= near:
            pairs = zip(makers[index], built, strict=True)
            built = [maker.further(found) for maker, found in pairs]
        out.append(tuple(built))
    return out


def _promising(
    order: Sequence[int], rough: Sequence[tuple[list[Sketch], ...]], effort: Effort, ranks: int
) -> list[int]:
    """Of layouts in order of their sketches, those over which programs are built.

    Over many ranks further ones only where they seem nearly as fast as the first, yet not just as
    fast: then they are most likely the same in another order.
    """
    few = list(order[: LAYOUTS[effort]])
    if ranks <= MANY_RANKS or effort is Effort.BEST:
        return few
    least = seconds_of(rough[few[0]])
    return [i for i in few if i == few[0] or least < seconds_of(rough[i]) <= least * NEAR_OF_MANY]


def layered_tiles(
    settings: Sequence[Setting], where: Where, options: TileOptions
) -> tuple[Setting, PassPlan, PassPlan]:
    """The tile strategy over several nodes: layers, or one level where that is simulated faster."""
    assert where.costs is not None
    found = layered(settings, where.place, where.costs, options)
    times = [sum(_least(built) for built in passes) for passes in found]
    best = min(range(len(settings)), key=lambda i: (times[i], i))
    made, parts = settings[best], []
    for pass_, built in zip(Pass, found[best], strict=True):
        part = _flat(pass_, made, where, options, _least(built))
        flat_ns = np.inf if part is None else float(part.predicted_ns or 0)
        if _least(built) <= flat_ns * NEAR_ARRANGED:
            first = built[0]
            layers = finished(pass_, made, where, options, first.part, first.assignment)
            if part is None or float(layers.predicted_ns or 0) <= flat_ns:
                part = layers
        assert part is not None
        parts.append(part)
    return made, parts[0], parts[1]


def _flat(
    pass_: Pass, made: Setting, where: Where, options: TileOptions, below_ns: float
) -> PassPlan | None:
    """Tiles of one level; None where many ranks could not be faster than `below_ns` with them."""
    assert where.costs is not None
    if where.place.ranks <= MANY_RANKS:
        quick = dataclasses.replace(options, effort=Effort.FAST)
        return plan_pass(pass_, "tile", made, where, quick)
    quick = dataclasses.replace(options, effort=Effort.INSTANT)
    assignment = assign_tiles(pass_, made, quick)
    floors = Floors(pass_, made, where.place.node_of, where.costs)
    ranks = np.array(assignment.ranks, dtype=np.int64)
    if floors.direct(Columns.of(assignment.blocks), ranks) * 1e9 >= below_ns:
        return None
    return timed(pass_, made, where, own_pass(pass_, "tile", made, where, assignment))


def finished(
    pass_: Pass,
    made: Setting,
    where: Where,
    options: TileOptions,
    part: PassPlan,
    assignment: Assignment,
) -> PassPlan:
    """A pass with its bound and with the order of least simulated time."""
    part = dataclasses.replace(part, bounds=bounded(pass_, made, options, assignment))
    return arranged(pass_, made, where, part, assignment, options.effort)


def _head_groups(made: Setting, options: TileOptions) -> list[int]:
    """Numbers of head ranges that a node's ranks may split."""
    if options.head_groups is not None:
        return [options.head_groups]
    cells = max(1, int(np.count_nonzero(made.grid.kinds[0].any(axis=0))))
    most = max(1, min(made.problem.heads, MOST_CELLS[options.effort] // cells))
    return [parts for parts in range(1, 129) if parts <= most]


def _sized(pass_: Pass, made: Setting, options: TileOptions, groups: int) -> SizedProblem:
    heads = made.problem.heads
    return sized_problem(
        pass_, made.problem, made.q_layout, made.kv_layout, blocks_of(made.grid, heads, groups),
        head_ranges(heads, groups), load_cap=options.load_cap, eta=options.eta,
    )  # fmt: skip


def _further(place: Place, sketch: Sketch, costs: Costs) -> list[How]:
    """Other ways to put messages together that may be faster."""
    found = [How()]
    if place.ranks > MANY_RANKS and sketch.crossing_s >= SHORT * costs.between.start_s:
        return found
    if sketch.crossing_s < SHORT * costs.between.start_s:
        found.insert(0, How(together=True))
    if place.nodes <= FEW_NODES:
        found.append(How(parts=2))
    return found


def _time(one: Layered) -> int:
    assert one.part.predicted_ns is not None
    return one.part.predicted_ns


def _least(built: Sequence[Layered]) -> float:
    """Of the fastest; infinite where nothing is built."""
    return min((float(_time(one)) for one in built), default=np.inf)


@dataclass(frozen=True, eq=False)
class _Maker:
    pass_: Pass
    made: Setting
    place: Place
    costs: Costs
    options: TileOptions
    sketches: Sequence[Sketch]

    def first(self) -> list[Layered]:
        """The program of the first sketch that keeps the load cap."""
        for sketch in self.sketches:
            found = self.built(sketch)
            if found is not None:
                return [found]
        return []

    def further(self, found: Sequence[Layered]) -> list[Layered]:
        """With those of more sketches, and with the fastest in other messages; sorted."""
        if not found:
            return []
        many = self.place.ranks > MANY_RANKS
        most = min(BUILT[self.options.effort], BUILT_OF_MANY if many else 99)
        left = BLOCKS - len(found[0].assignment.blocks)
        out = list(found)
        for sketch in self.sketches:
            if sketch is not found[0].sketch and len(out) < most and left >= 0:
                each = self.built(sketch)
                if each is not None:
                    left -= len(each.assignment.blocks)
                    out.append(each)
        best = min(out, key=_time)
        for how in _further(self.place, best.sketch, self.costs):
            left -= len(best.assignment.blocks)
            if left >= 0:
                out.append(self.simulated(best.sketch, best.assignment, how))
        return sorted(out, key=_time)

    def built(self, sketch: Sketch) -> Layered | None:
        """The program of a sketch; None over a load cap that the caller gave."""
        assignment = self.assignment(sketch)
        if not assignment.blocks or not self.within_cap(assignment):
            return None
        return self.simulated(sketch, assignment, FIRST)

    def assignment(self, sketch: Sketch) -> Assignment:
        """A sketch with the rank of every block."""
        parts, made = sketch.head_groups, self.made
        sized = _sized(self.pass_, made, self.options, parts)
        blocks = blocks_of(made.grid, made.problem.heads, parts)
        levels = Levels(
            self.pass_,
            made,
            Nodes.of(self.place.node_of),
            _sized(self.pass_, made, self.options, 1).tiling,
        )
        cells = levels.ranks(sketch.start, sketch.mesh)
        volume = evaluate(sized.tiling, np.where(sized.tiling.weight > 0, cells, NO_RANK))
        bounds = Bounds(float(volume.max_volume), 0.0, volume.max_volume == 0)
        ranks: list[int] = cells.reshape(-1)[sized.cell_of].tolist()
        return Assignment(blocks, ranks, parts, bounds, (), sketch.name)

    def within_cap(self, assignment: Assignment) -> bool:
        """Whether a cap that the caller gave is kept."""
        if self.options.load_cap is None:
            return True
        load = np.bincount(assignment.ranks, weights=[b.weight for b in assignment.blocks])
        return bool(load.max() * self.place.ranks <= self.options.load_cap * load.sum())

    def simulated(self, sketch: Sketch, assignment: Assignment, how: How) -> Layered:
        """The program of an assignment, and its simulated time."""
        made, nodes = self.made, self.place.node_of
        given = (self.pass_, made.problem, made.q_layout, made.kv_layout, nodes)
        program = build_relayed(*given, assignment.blocks, assignment.ranks, how)
        seconds = simulate_pass(*given, program, self.costs).makespan_s
        notes = (
            f"assignment: in layers, {assignment.origin}",
            f"messages: over gateways, {_described(how)}",
        )
        part = PassPlan(
            "tile", assignment.head_groups, assignment.bounds, notes, program,
            predicted_ns=round(seconds * 1e9),
        )  # fmt: skip
        return Layered(sketch, assignment, part)


def _described(how: How) -> str:
    if how.together:
        return "all waves together"
    words = [f"{how.parts} waves for each pair of nodes" if how.parts > 1 else "a wave a node"]
    if how.grouped:
        words.append("one collective a node and wave")
    return ", ".join(words)
