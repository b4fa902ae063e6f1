"""Chooses among all strategies and layouts: floors first, simulated time decides.

A note on the order. Every candidate has a floor, a time that it cannot beat
(`ultraattn.planning.floors`):

    floors           all candidates of both passes over every layout; nothing is built
    simulated        layout by layout, the lowest floors first, as long as a floor is below the
                     best simulated time: what is left out could not have won
    searched         over the best two layouts, longer searches from what won there

So the choice is never slower than any rival in simulated time, both passes together (one layout
serves both). Within 1 % the lower traffic wins. Effort `instant` builds and simulates what floors
promise most of, a candidate or two a pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ultraattn.errors import InputError
from ultraattn.planning import layers
from ultraattn.planning.assign import (
    Assignment,
    TileOptions,
    assign_rows,
    assign_structured,
    assign_tiles,
    bounded,
)
from ultraattn.planning.floors import Columns, Floors
from ultraattn.planning.passes import Where, arranged, own_pass, rival_pass, timed, with_volume
from ultraattn.planning.setting import Setting
from ultraattn.planning.tiling import Effort
from ultraattn.plans.account import account
from ultraattn.plans.check import Pass
from ultraattn.plans.plan import PassPlan
from ultraattn.plans.program import Program
from ultraattn.strategies import NAMES as RIVALS
from ultraattn.strategies import Strategy
from ultraattn.strategies.mesh import mesh_ranks

TIE = 0.01
"""Simulated times within 1 % of the best count as equal (issue "Predict and choose")."""
STARTS, STARTS_OF_MANY, STARTS_INSTANT = 8, 4, 2
"""Structured assignments of each number of head ranges that get a floor; fewer over many ranks,
and at effort instant."""
MOST_OWN, MOST_OWN_OF_MANY, MANY_RANKS = 8, 3, 16
"""Own assignments that are simulated of each pass and layout, the lowest floors first."""
SEARCHED_LAYOUTS = 2
HOPELESS = 1.25
"""Tiles that take so many times the best are not searched any longer."""
OVER_OWN, OVER_OTHERS = 1.15, 1.05
OVER_FLOOR = {"double_ring": 1.15, "allgather": 1.0, "mesh": OVER_OWN}
"""Simulated time over the floor in the median of candidates (causal, document, global_local; 8 and
32 ranks): what effort `instant` expects of a candidate that it does not build."""
DISAPPOINTS = 1.1
"""The second candidate is built where the first takes so much more than that one may."""
MOST_STEPS = 16
"""Over many ranks, longer rings are not built at effort `instant`: they take too long to plan."""
NAMED = 8
"""Simulated candidates that the notes name, the fastest first."""


@dataclass(eq=False)
class _Option:
    """A candidate of one pass over one layout; `part` once it is built and simulated."""

    label: str
    floor_ns: float
    make: Callable[[Program | None], PassPlan]
    """The pass, with its program where an equal candidate has built it."""
    rival: bool
    same_as: bytes = b""
    """Equal for candidates that give the same program."""
    assignment: Assignment | None = None
    bounded: bool = False
    """Whether the assignment's bounds are those of a search."""
    part: PassPlan | None = None
    in_layers: bool = False
    """Whether it is planned in layers, nodes first."""

    @property
    def known_ns(self) -> float:
        """The simulated time, or the floor."""
        known = None if self.part is None else self.part.predicted_ns
        return self.floor_ns if known is None else float(known)

    @property
    def expected_ns(self) -> float:
        """The floor, and what programs of its kind usually take beyond it."""
        kind = self.label.partition(":")[0]
        return self.floor_ns * (OVER_FLOOR.get(kind, OVER_OTHERS) if self.rival else OVER_OWN)


@dataclass(eq=False)
class _Field:
    """All candidates of one pass over one layout."""

    pass_: Pass
    made: Setting
    where: Where
    options: list[_Option]
    made_already: dict[bytes, PassPlan] = field(default_factory=dict)

    @property
    def least_ns(self) -> float:
        """No candidate takes less."""
        return min(option.known_ns for option in self.options)

    @property
    def simulated(self) -> list[_Option]:
        """What has been simulated, the fastest first."""
        return sorted((o for o in self.options if o.part is not None), key=lambda o: o.known_ns)

    @property
    def best_ns(self) -> float:
        """The least simulated time."""
        return min((o.known_ns for o in self.options if o.part is not None), default=np.inf)

    @property
    def expected_ns(self) -> float:
        """What the most promising candidate may take."""
        return min(option.expected_ns for option in self.options)

    def simulate_expected(self) -> None:
        """Simulates what promises most, own or rival; the other too where the first disappoints."""
        kinds = ([o for o in self.options if o.rival is rival] for rival in (False, True))
        best = [min(kind, key=lambda o: o.expected_ns) for kind in kinds if kind]
        for option in sorted(best, key=lambda o: o.expected_ns):
            if option.expected_ns * DISAPPOINTS < self.best_ns:
                self.simulate(option)

    def simulate(self, option: _Option) -> None:
        """Builds and simulates one candidate, or takes over what an equal one gave."""
        known = self.made_already.get(option.same_as)
        if known is None:
            option.part = timed(self.pass_, self.made, self.where, option.make(None))
            self.made_already[option.same_as or option.label.encode()] = option.part
        else:
            part = option.make(known.program)
            option.part = dataclasses.replace(part, predicted_ns=known.predicted_ns)

    def settle(self, below_ns: float) -> None:
        """Simulates candidates until none left has a floor below the best time and `below_ns`."""
        most = MOST_OWN if self.made.q_layout.ranks <= MANY_RANKS else MOST_OWN_OF_MANY
        own = 0
        for option in sorted(self.options, key=lambda o: o.floor_ns):
            if option.floor_ns >= min(self.best_ns, below_ns):
                return
            if option.part is None and (option.rival or own < most):
                own += not option.rival
                self.simulate(option)


@dataclass(eq=False)
class _Case:
    """Both passes over one layout."""

    made: Setting
    fields: tuple[_Field, ...]

    @property
    def least_ns(self) -> float:
        """No pair of candidates takes less."""
        return sum(field.least_ns for field in self.fields)

    @property
    def best_ns(self) -> float:
        """The least simulated time of both passes."""
        return sum(field.best_ns for field in self.fields)

    def settle(self, below_ns: float) -> None:
        """Finds the best of each pass, unless the case cannot get below `below_ns`."""
        for at, one in enumerate(self.fields):
            others = sum(f.least_ns for i, f in enumerate(self.fields) if i != at)
            one.settle(below_ns - others)

    def least_rival(self) -> tuple[float, str]:
        """No rival takes less over this layout, both passes together; nanoseconds, and whose."""
        times: dict[str, float] = {}
        for one in self.fields:
            for option in one.options:
                if option.rival:
                    times[option.label] = times.get(option.label, 0.0) + option.known_ns
        return min(((time, label) for label, time in times.items()), default=(np.inf, ""))


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


def best_passes(settings: Sequence[Setting], where: Where, options: TileOptions) -> Choice:
    """The layout and the two passes of least simulated time; their notes say what was considered.

    Args:
        settings: the mask over each layout that is compared.
        where: with costs.
        options: of this system's own assignments.

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
        for one in chosen.fields:
            one.simulate_expected()
    else:
        best_ns = np.inf
        for case in cases:
            if case.least_ns < best_ns:
                case.settle(best_ns)
                best_ns = min(best_ns, case.best_ns)
        searched = SEARCHED_LAYOUTS if settings[0].q_layout.ranks <= MANY_RANKS else 1
        for case in sorted(cases, key=lambda c: c.best_ns)[:searched]:
            if case.best_ns < np.inf:
                _search(case, where, options)
        chosen = min(cases, key=lambda c: c.best_ns)
    least_rival_ns, whose = min(case.least_rival() for case in cases)
    picked = _picked(chosen, least_rival_ns)
    others = [case for case in cases if case is not chosen]
    parts = [
        _finished(one, option, others, options)
        for one, option in zip(chosen.fields, picked, strict=True)
    ]
    return Choice(chosen.made, parts[0], parts[1], least_rival_ns, whose)


def _picked(case: _Case, least_rival_ns: float) -> list[_Option]:
    """Of each pass the least traffic within 1 % of the best; the best where rivals are as near."""
    picked = []
    for one in case.fields:
        near = [o for o in one.simulated if o.known_ns <= one.best_ns * (1 + TIE)]
        picked.append(min(near, key=lambda o: (_traffic(one, o), o.known_ns)))
    if sum(option.known_ns for option in picked) > least_rival_ns:
        return [one.simulated[0] for one in case.fields]
    return picked


def _traffic(one: _Field, option: _Option) -> int:
    assert option.part is not None
    costs = account(one.made.problem, option.part.program, one.where.place.node_of)
    return int(costs.sent.sum())


def _finished(
    one: _Field, option: _Option, others: Sequence[_Case], options: TileOptions
) -> PassPlan:
    """The chosen pass with its volume, its bound, and what was considered."""
    part = option.part
    assert part is not None
    if option.rival:
        part = with_volume(one.made, one.where, part)
    elif option.assignment is not None and options.effort is not Effort.INSTANT:
        if not option.bounded:
            known = bounded(one.pass_, one.made, options, option.assignment)
            part = dataclasses.replace(part, bounds=known)
        part = arranged(one.pass_, one.made, one.where, part, option.assignment, options.effort)
    notes = [*part.notes, *_report(one, others), *_refused(one.made)]
    return dataclasses.replace(part, notes=tuple(notes))


def _report(one: _Field, others: Sequence[_Case]) -> list[str]:
    """What was considered, in a few lines."""
    times = one.simulated
    more = f", and {len(times) - NAMED} slower" if len(times) > NAMED else ""
    named = ", ".join(f"{o.label} {o.known_ns / 1e6:.3f} ms" for o in times[:NAMED])
    notes = [f"simulated: {named}{more}"]
    left = sorted((o for o in one.options if o.part is None), key=lambda o: o.floor_ns)
    rivals = ", ".join(f"{o.label} >= {o.floor_ns / 1e6:.3f} ms" for o in left if o.rival)
    if rivals:
        notes.append(f"left out, slower at the least: {rivals}")
    own = sum(not o.rival for o in left)
    if own:
        notes.append(f"left out by their floors: {own} other assignments of tiles")
    for case in others:
        layout = case.made.q_layout
        exact = case.best_ns < np.inf
        total = (case.best_ns if exact else case.least_ns) / 1e6
        notes.append(
            f"layout {layout.name} of {len(layout.chunks)} chunks: both passes "
            f"{'' if exact else '>= '}{total:.3f} ms"
        )
    return notes


def _refused(made: Setting) -> list[str]:
    """Why rivals cannot serve at all."""
    ranks = made.q_layout.ranks
    return [
        f"left out: {reason}"
        for rival in RIVALS.values()
        if not rival.variants(made.problem, ranks)
        and (reason := rival.refusal(made.problem, ranks)) is not None
    ]


def _case(made: Setting, where: Where, options: TileOptions) -> _Case:
    columns: dict[int, Columns] = {}
    return _Case(made, tuple(_field(pass_, made, where, options, columns) for pass_ in Pass))


def _field(
    pass_: Pass, made: Setting, where: Where, options: TileOptions, columns: dict[int, Columns]
) -> _Field:
    assert where.costs is not None
    floors = Floors(pass_, made, where.place.node_of, where.costs)
    one = _Field(pass_, made, where, [])
    first: Assignment | None = None
    seen: set[bytes] = set()
    in_layers = layers.serves(where.place, where.costs, options)
    for assignment in _own_assignments(pass_, made, options, in_layers):
        first = first or assignment
        name = _name(assignment.head_groups, assignment.ranks)
        if name not in seen:
            seen.add(name)
            one.options.append(_own_option(one, floors, columns, assignment, name))
    for rival in _rivals(made, len(set(where.place.node_of))):
        if options.effort is not Effort.INSTANT or _quick(rival, made):
            one.options.append(_rival_option(one, floors, rival, first))
    return one


def _own_assignments(
    pass_: Pass, made: Setting, options: TileOptions, in_layers: bool
) -> Iterator[Assignment]:
    yield assign_rows(pass_, made, options)
    many = made.q_layout.ranks > MANY_RANKS
    most = STARTS_OF_MANY if many else STARTS
    if options.effort is Effort.INSTANT:
        most = STARTS_INSTANT
    yield from assign_structured(pass_, made, options, most)


def _name(groups: int, ranks: Sequence[int]) -> bytes:
    return np.array([groups, *ranks], dtype=np.int32).tobytes()


def _own_option(
    one: _Field,
    floors: Floors,
    columns: dict[int, Columns],
    assignment: Assignment,
    name: bytes,
    prefix: str = "tile",
) -> _Option:
    groups = assignment.head_groups
    if groups not in columns:
        columns[groups] = Columns.of(assignment.blocks)
    floor = floors.direct(columns[groups], np.array(assignment.ranks, dtype=np.int64))
    strategy = "rows" if assignment.origin == "rows" and groups == 1 else "tile"
    label = strategy if strategy == "rows" else f"{prefix} ({assignment.origin})"
    return _Option(
        label,
        floor * 1e9,
        lambda program: own_pass(one.pass_, strategy, one.made, one.where, assignment, program),
        rival=False,
        same_as=name,
        assignment=assignment,
    )


def _rival_option(
    one: _Field, floors: Floors, rival: Strategy, whole: Assignment | None
) -> _Option:
    name = b""
    made = one.made
    if rival.name == "mesh" and whole is not None and whole.head_groups == 1:
        shape = rival.resolved(made.problem, made.q_layout.ranks)
        name = _name(1, mesh_ranks(whole.blocks, made.q_layout, made.kv_layout, shape))
    return _Option(
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


def _add_layers(cases: Sequence[_Case], where: Where, options: TileOptions) -> None:
    """Adds what is planned in layers, built and simulated: rivals above it need not be built."""
    assert where.costs is not None
    found = layers.layered([case.made for case in cases], where.place, where.costs, options)
    for case, passes in zip(cases, found, strict=True):
        for one, built in zip(case.fields, passes, strict=True):
            for each in built:
                one.options.append(_layered_option(each))


def _layered_option(found: layers.Layered) -> _Option:
    part = found.part
    return _Option(
        f"tile ({found.label})",
        float(part.predicted_ns or 0),
        lambda program: part,
        rival=False,
        assignment=found.assignment,
        part=part,
        in_layers=True,
    )


def _search(case: _Case, where: Where, options: TileOptions) -> None:
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
        if min(o.known_ns for o in own) > one.best_ns * HOPELESS:
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
            option = _own_option(one, floors, columns, assignment, name, f"tile {variant}")
            option.bounded = True
            one.options.append(option)
        one.settle(np.inf)
