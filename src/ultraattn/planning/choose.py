"""Chooses among all strategies and layouts: floors first, simulated time decides.

A note on the order. Every candidate has a floor, a time that it cannot beat
(`ultraattn.planning.floors`):

    floors           all candidates of both passes over every layout; nothing is built
    simulated        layout by layout, the lowest floors first, as long as a floor is below the
                     best simulated time: what is left out could not have won
    searched         over the best two layouts, longer searches from what won there
    arranged         there too, own candidates near the best: launches joined, streams in order

So the choice is never slower than any rival in simulated time, both passes together (one layout
serves both). Within 1 % the lower traffic wins. Effort `instant` builds and simulates what floors
promise most of, a candidate or two a pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ultraattn.errors import InputError
from ultraattn.planning import layers
from ultraattn.planning.assign import (
    Assignment,
    TileOptions,
    assign_rows,
    assign_structured,
    assign_tiles,
)
from ultraattn.planning.candidates import MANY_RANKS, Case, Field, Option
from ultraattn.planning.chosen import finished, picked
from ultraattn.planning.floors import Columns, Floors
from ultraattn.planning.passes import Where, own_pass, rival_pass
from ultraattn.planning.setting import Setting
from ultraattn.planning.tiling import Effort
from ultraattn.plans.check import Pass
from ultraattn.plans.plan import PassPlan
from ultraattn.strategies import NAMES as RIVALS
from ultraattn.strategies import Strategy
from ultraattn.strategies.mesh import mesh_ranks

STARTS, STARTS_OF_MANY, STARTS_INSTANT = 8, 4, 2
"""Structured assignments of each number of head ranges that get a floor; fewer over many ranks,
and at effort instant."""
SEARCHED_LAYOUTS, LAYOUTS_NEAR = 2, 1.1
"""So many layouts are searched, as far as they take at most so many times the best one."""
HOPELESS, HOPELESS_OF_MANY = 1.25, 1.1
"""Tiles that take so many times the best are not searched any longer; less over many ranks."""
TILE_NEAR = 1.05
"""What `tile` takes is searched for long where a short search leads to so many times the best."""
MOST_STEPS = 16
"""Over many ranks, longer rings are not built at effort `instant`: they take too long to plan."""


@dataclass(frozen=True, eq=False)
class Choice:
    """The layout and both passes that were chosen."""

    made: Setting
    forward: PassPlan
    backward: PassPlan
    least_rival_ns: float
    """No rival takes less over any of the layouts, both passes together."""
    least_rival: str
    """Whose time, or floor, that is."""


def best_passes(
    settings: Sequence[Setting], where: Where, options: TileOptions, tile: Setting | None = None
) -> Choice:
    """The layout and the two passes of least simulated time; their notes say what was considered.

    Args:
        settings: the mask over each layout that is compared.
        where: with costs.
        options: of this system's own assignments.
        tile: the mask over the layout that strategy `tile` takes, where that is a candidate too.

    Raises:
        InputError: the cluster has no costs to simulate with.
    """
    if where.costs is None:
        raise InputError(
            f"strategy 'auto' on cluster {where.place.cluster!r}, which has no costs; pass a "
            "preset or a file of `ultraattn profile`, or strategy='tile'"
        )
    cases = [_case(made, where, options) for made in settings]
    if layers.serves(where.place, where.costs, options):
        _add_layers(cases, where, options)
    cases.sort(key=lambda case: case.least_ns)
    if options.effort is Effort.INSTANT:
        chosen = min(cases, key=lambda case: sum(one.expected_ns for one in case.fields))
        chosen = _instant(chosen, cases, tile, where, options)
    else:
        best_ns = np.inf
        for case in cases:
            if case.least_ns < best_ns:
                case.settle(best_ns)
                best_ns = min(best_ns, case.best_ns)
        searched = SEARCHED_LAYOUTS if settings[0].q_layout.ranks <= MANY_RANKS else 1
        limit_ns = best_ns * LAYOUTS_NEAR
        near = sorted(cases, key=lambda c: c.best_ns)[:searched]
        near = [case for case in near if case.best_ns < np.inf and case.best_ns <= limit_ns]
        for case in near:
            _search(case, where, options)
        if tile is not None and not layers.serves(where.place, where.costs, options):
            near += [case for case in [_with_tile(cases, tile, where, options)] if case not in near]
        for case in near:
            for one in case.fields:
                one.arrange(options.effort)
        chosen = min(cases, key=lambda c: c.best_ns)
    least_rival_ns, whose = min(case.least_rival() for case in cases)
    options_taken = picked(chosen, min(least_rival_ns, _tile_ns(cases, chosen)))
    others = [case for case in cases if case is not chosen]
    parts = [
        finished(one, option, others, options)
        for one, option in zip(chosen.fields, options_taken, strict=True)
    ]
    return Choice(chosen.made, parts[0], parts[1], least_rival_ns, whose)


def _case(made: Setting, where: Where, options: TileOptions) -> Case:
    columns: dict[int, Columns] = {}
    return Case(made, tuple(_field(pass_, made, where, options, columns) for pass_ in Pass))


def _field(
    pass_: Pass, made: Setting, where: Where, options: TileOptions, columns: dict[int, Columns]
) -> Field:
    assert where.costs is not None
    floors = Floors(pass_, made, where.place.node_of, where.costs)
    one = Field(pass_, made, where, [])
    found: dict[bytes, Assignment] = {}
    for assignment in _own_assignments(pass_, made, options):
        found.setdefault(_name(assignment.head_groups, assignment.ranks), assignment)
    first = next(iter(found.values()), None)
    one.options += _own_options(one, floors, columns, found)
    for rival in _rivals(made, len(set(where.place.node_of))):
        if options.effort is not Effort.INSTANT or _quick(rival, made):
            one.options.append(_rival_option(one, floors, rival, first))
    return one


def _own_assignments(pass_: Pass, made: Setting, options: TileOptions) -> Iterator[Assignment]:
    yield assign_rows(pass_, made, options)
    most = STARTS_OF_MANY if made.q_layout.ranks > MANY_RANKS else STARTS
    if options.effort is Effort.INSTANT:
        most = STARTS_INSTANT
    yield from assign_structured(pass_, made, options, most)


def _name(groups: int, ranks: Sequence[int]) -> bytes:
    return np.array([groups, *ranks], dtype=np.int32).tobytes()


def _own_options(
    one: Field,
    floors: Floors,
    columns: dict[int, Columns],
    found: Mapping[bytes, Assignment],
    prefix: str = "tile",
) -> list[Option]:
    """An option for each assignment; floors of those with equal blocks are found together."""
    by_groups: dict[int, list[bytes]] = {}
    for name, assignment in found.items():
        by_groups.setdefault(assignment.head_groups, []).append(name)
    least: dict[bytes, float] = {}
    for groups, names in by_groups.items():
        if groups not in columns:
            columns[groups] = Columns.of(found[names[0]].blocks)
        ranks = np.array([found[name].ranks for name in names], dtype=np.int64)
        least |= dict(zip(names, floors.directs(columns[groups], ranks).tolist(), strict=True))
    return [
        _own_option(one, assignment, name, least[name], prefix)
        for name, assignment in found.items()
    ]


def _own_option(
    one: Field, assignment: Assignment, name: bytes, floor_s: float, prefix: str
) -> Option:
    rows = assignment.origin == "rows" and assignment.head_groups == 1
    strategy = "rows" if rows else "tile"
    label = strategy if rows else f"{prefix} ({assignment.origin})"
    return Option(
        label,
        floor_s * 1e9,
        lambda program: own_pass(one.pass_, strategy, one.made, one.where, assignment, program),
        rival=False,
        same_as=name,
        assignment=assignment,
    )


def _rival_option(one: Field, floors: Floors, rival: Strategy, whole: Assignment | None) -> Option:
    name = b""
    made = one.made
    if rival.name == "mesh" and whole is not None and whole.head_groups == 1:
        shape = rival.resolved(made.problem, made.q_layout.ranks)
        name = _name(1, mesh_ranks(whole.blocks, made.q_layout, made.kv_layout, shape))
    return Option(
        rival.label,
        floors.of_rival(rival) * 1e9,
        lambda program: rival_pass(one.pass_, rival, made, one.where, program),
        rival=True,
        same_as=name,
    )


def _quick(rival: Strategy, made: Setting) -> bool:
    """Whether a rival's program is built in no time; meshes are among the own assignments."""
    if rival.name in ("allgather", "mesh"):
        return rival.name == "allgather"
    ranks = made.q_layout.ranks
    return ranks <= MANY_RANKS or ranks // rival.lanes(made.problem, ranks) <= MOST_STEPS


def _rivals(made: Setting, nodes: int) -> list[Strategy]:
    """Every rival that can serve, each shape apart; rings go by the name of their layout.

    Programs that are another rival's too are left out: rings of one lane, one place or one node.
    """
    found: list[Strategy] = []
    ranks = made.q_layout.ranks
    ring = {"zigzag": "zigzag", "striped": "stripe"}.get(made.q_layout.name, "ring")
    for rival in RIVALS.values():
        if rival.name in ("ring", "zigzag", "stripe") and rival.name != ring:
            continue
        if rival.name == "double_ring" and nodes == 1:
            continue
        for variant in rival.variants(made.problem, ranks):
            if variant.name != "heads_ring" or variant.shape not in ((1, ranks), (ranks, 1)):
                found.append(variant)
    return found


def _add_layers(cases: Sequence[Case], where: Where, options: TileOptions) -> None:
    """Adds what is planned in layers, built and simulated: rivals above it need not be built."""
    assert where.costs is not None
    found = layers.layered([case.made for case in cases], where.place, where.costs, options)
    for case, passes in zip(cases, found, strict=True):
        for one, built in zip(case.fields, passes, strict=True):
            for each in built:
                one.options.append(_layered_option(each))


def _layered_option(found: layers.Layered) -> Option:
    part = found.part
    return Option(
        f"tile ({found.label})",
        float(part.predicted_ns or 0),
        lambda program: part,
        rival=False,
        assignment=found.assignment,
        part=part,
        in_layers=True,
    )


def _instant(
    chosen: Case, cases: Sequence[Case], tile: Setting | None, where: Where, options: TileOptions
) -> Case:
    """The choice of effort `instant`: what floors promise most of, or what `tile` takes.

    The more promising of both is built first, the other only where it may be faster: what `tile`
    takes as long as its floors are below, so that it never beats the choice.
    """
    expected_ns = sum(one.expected_ns for one in chosen.fields)
    own = None if tile is None else _tile_alone(cases, tile, where, options)
    if own is not None and sum(one.options[0].expected_ns for one in own.fields) < expected_ns:
        for one in own.fields:
            one.simulate(one.options[0])
        if own.best_ns <= expected_ns:
            return own
    for one in chosen.fields:
        one.simulate_expected()
    if own is None or sum(one.options[0].known_ns for one in own.fields) >= chosen.best_ns:
        return chosen
    for one in own.fields:
        if one.options[0].part is None:
            one.simulate(one.options[0])
    return own if own.best_ns < chosen.best_ns else chosen


def _tile_alone(cases: Sequence[Case], tile: Setting, where: Where, options: TileOptions) -> Case:
    """What strategy `tile` takes, and nothing else to simulate; rivals as far as they are known."""
    known = _of_layout(cases, tile)
    fields = []
    for at, pass_ in enumerate(Pass):
        one = Field(pass_, tile, where, [])
        one.options += _tile_options(one, options)
        if known is not None:
            one.options += [option for option in known.fields[at].options if option.rival]
        fields.append(one)
    return Case(tile, tuple(fields))


def _with_tile(cases: list[Case], tile: Setting, where: Where, options: TileOptions) -> Case:
    """The case of the layout that `tile` takes, with its assignments among the simulated.

    A long search first shows, by a short one, that it leads near the best: it moves fewer bytes,
    but launches stay as they are.
    """
    case = _of_layout(cases, tile)
    if case is None:
        case = _case(tile, where, options)
        cases.append(case)
    limit_ns = min(one.best_ns for one in cases) * TILE_NEAR
    efforts = [Effort.FAST, options.effort] if options.effort is not Effort.FAST else [Effort.FAST]
    for effort in efforts:
        short = dataclasses.replace(options, effort=effort)
        if sum(_add_tile(one, short) for one in case.fields) > limit_ns:
            break
    return case


def _add_tile(one: Field, options: TileOptions) -> float:
    """Adds and simulates what `tile` takes for a pass; its time, quickly arranged."""
    (option,) = _tile_options(one, options)
    known = [o for o in one.options if o.same_as == option.same_as and not o.rival]
    if not known:
        one.options.append(option)
    for each in known or [option]:
        each.as_tile = True
        if each.part is None:
            one.simulate(each)
        if not each.ways and option.assignment is not None and option.assignment.blocks:
            one.arrange_one(each, options.effort)
    return min(each.known_ns for each in known or [option])


def _tile_options(one: Field, options: TileOptions) -> list[Option]:
    """The assignment of strategy `tile` for a pass, as an option."""
    assert one.where.costs is not None
    floors = Floors(one.pass_, one.made, one.where.place.node_of, one.where.costs)
    assignment = assign_tiles(one.pass_, one.made, options)
    name = _name(assignment.head_groups, assignment.ranks)
    (option,) = _own_options(one, floors, {}, {name: assignment})
    option.bounded = option.as_tile = True
    return [option]


def _tile_ns(cases: Sequence[Case], chosen: Case) -> float:
    """What strategy `tile` takes, as far as it was simulated."""
    found = [
        sum(
            min((o.known_ns for o in one.options if o.as_tile), default=np.inf)
            for one in case.fields
        )
        for case in (*cases, chosen)
    ]
    return float(min(found))


def _of_layout(cases: Sequence[Case], made: Setting) -> Case | None:
    """The case whose chunks have the same owners."""
    places = made.places
    return next((case for case in cases if case.made.places == places), None)


def _search(case: Case, where: Where, options: TileOptions) -> None:
    """Adds what a longer search finds: with the head ranges that were best, and a looser cap.

    The planner weighs load against volume in seconds: a looser cap moves less.
    """
    assert where.costs is not None
    effort = Effort.NORMAL if options.effort is Effort.BEST else Effort.FAST
    for one in case.fields:
        own = [
            o
            for o in one.options
            if o.assignment is not None and o.assignment.blocks and not o.in_layers
        ]
        if not own:
            continue
        floors = Floors(one.pass_, one.made, where.place.node_of, where.costs)
        best = min(own, key=lambda o: (o.part is None, o.known_ns)).assignment
        assert best is not None
        many = one.made.q_layout.ranks > MANY_RANKS
        if min(o.known_ns for o in own) > one.best_ns * (HOPELESS_OF_MANY if many else HOPELESS):
            continue
        base = dataclasses.replace(options, effort=effort, head_groups=best.head_groups)
        variants = {"searched": base}
        if options.load_cap is None:
            variants["searched, cap 1.25"] = dataclasses.replace(base, load_cap=1.25)
        columns: dict[int, Columns] = {}
        for variant, choice in variants.items():
            assignment = assign_tiles(one.pass_, one.made, choice)
            name = _name(assignment.head_groups, assignment.ranks)
            if any(o.same_as == name and not o.rival for o in one.options):
                continue
            (option,) = _own_options(one, floors, columns, {name: assignment}, f"tile {variant}")
            option.bounded = True
            one.options.append(option)
        one.settle(np.inf)
