"""Holds what `choose` compares: candidates of a pass over a layout, their floors and times.

case        both passes over one layout
field       all candidates of one pass over it
option      one candidate: a floor, and a program with its simulated time once it is built
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ultraattn.planning.arrange import Arranged, fastest
from ultraattn.planning.assign import Assignment
from ultraattn.planning.passes import Where, quickly_arranged, timed
from ultraattn.planning.setting import Setting
from ultraattn.planning.tiling import Effort
from ultraattn.plans.check import Pass
from ultraattn.plans.plan import PassPlan
from ultraattn.plans.program import Program

MOST_OWN, MOST_OWN_OF_MANY, MANY_RANKS = 8, 3, 16
"""Own assignments that are simulated of each pass and layout, the lowest floors first."""
OVER_OWN, OVER_OTHERS = 1.15, 1.05
OVER_FLOOR = {"double_ring": 1.15, "allgather": 1.0, "mesh": OVER_OWN}
"""Simulated time over the floor in the median of candidates (causal, document, global_local; 8 and
32 ranks): what effort `instant` expects of a candidate that it does not build."""
DISAPPOINTS = 1.1
"""The second candidate is built where the first takes so much more than that one may."""

MOST_ARRANGED, MOST_ARRANGED_OF_MANY = 4, 2
"""Own candidates of each pass that are arranged before one is chosen; fewer over many ranks."""
NEAR, NEAR_OF_MANY = 1.15, 1.1
"""Of these, only those that take at most so many times the best as they are."""
ROOM_OF_MANY = 1.05
"""Over many ranks own candidates are built where so many times their floor is below the best."""


@dataclass(eq=False)
class Option:
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
    """As it was built, by arrival."""
    as_tile: bool = False
    """Whether strategy `tile` takes this assignment at the same effort."""
    in_layers: bool = False
    """Whether it is planned in layers, nodes first."""
    ways: Sequence[Arranged] = ()
    """Arrangements of `part` that are quick to make, once they are made."""

    @property
    def known_ns(self) -> float:
        """The simulated time, of the fastest arrangement where there are any; or the floor."""
        if self.ways:
            return float(fastest(self.ways).time_ns)
        known = None if self.part is None else self.part.predicted_ns
        return self.floor_ns if known is None else float(known)

    @property
    def expected_ns(self) -> float:
        """The floor, and what programs of its kind usually take beyond it."""
        kind = self.label.partition(":")[0]
        return self.floor_ns * (OVER_FLOOR.get(kind, OVER_OTHERS) if self.rival else OVER_OWN)


@dataclass(eq=False)
class Field:
    """All candidates of one pass over one layout."""

    pass_: Pass
    made: Setting
    where: Where
    options: list[Option]
    made_already: dict[bytes, PassPlan] = field(default_factory=dict)

    @property
    def least_ns(self) -> float:
        """No candidate takes less."""
        return min(option.known_ns for option in self.options)

    @property
    def simulated(self) -> list[Option]:
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

    def simulate(self, option: Option) -> None:
        """Builds and simulates one candidate, or takes over what an equal one gave."""
        known = self.made_already.get(option.same_as)
        if known is None:
            option.part = timed(self.pass_, self.made, self.where, option.make(None))
            self.made_already[option.same_as or option.label.encode()] = option.part
        else:
            part = option.make(known.program)
            option.part = dataclasses.replace(part, predicted_ns=known.predicted_ns)

    def arrange(self, effort: Effort) -> None:
        """Arranges this system's own candidates that are near the best, and not yet arranged.

        Launches by arrival tell little of what an assignment gives once they are joined and put
        in order: the second best by arrival is often the best arranged.
        """
        many = self.made.q_layout.ranks > MANY_RANKS
        limit = self.best_ns * (NEAR_OF_MANY if many else NEAR)
        seen: set[bytes] = set()
        for option in self.simulated:
            if option.assignment is None or not option.assignment.blocks:
                continue
            if len(seen) == (MOST_ARRANGED_OF_MANY if many else MOST_ARRANGED):
                return
            name = option.same_as or option.label.encode()
            if option.known_ns <= limit and name not in seen and not option.ways:
                self.arrange_one(option, effort)
            seen.add(name)

    def arrange_one(self, option: Option, effort: Effort) -> None:
        """Arranges one simulated candidate of this system, without the solver."""
        assert option.part is not None
        option.ways = quickly_arranged(self.pass_, self.made, self.where, option.part, effort)

    def settle(self, below_ns: float) -> None:
        """Simulates candidates until none left has a floor below the best time and `below_ns`."""
        many = self.made.q_layout.ranks > MANY_RANKS
        most, room = (MOST_OWN_OF_MANY, ROOM_OF_MANY) if many else (MOST_OWN, 1.0)
        own = 0
        for option in sorted(self.options, key=lambda o: o.floor_ns):
            limit = min(self.best_ns, below_ns)
            if option.floor_ns >= limit:
                return
            if not option.rival and option.floor_ns * room >= limit and limit < np.inf:
                continue
            if option.part is None and (option.rival or own < most):
                own += not option.rival
                self.simulate(option)


@dataclass(eq=False)
class Case:
    """Both passes over one layout."""

    made: Setting
    fields: tuple[Field, ...]

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
