"""The axes of the matrix, its cases, and a subset in which every pair of values meets."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields, replace

from tests.exactness.masks import MASKS
from ultraattn import plan
from ultraattn.chunks import Chunk
from ultraattn.errors import InputError
from ultraattn.masks import Lengths, Mask
from ultraattn.planning.layout import explicit
from ultraattn.plans import Layout, Plan

HEAD_DIM = 16

AXES: dict[str, tuple] = {
    "mask": tuple(MASKS),
    "layout": ("contiguous", "zigzag", "striped", "remapped", "explicit"),
    "ranks": (1, 2, 3, 4, 8),
    "lengths": (
        (1, 1),
        (7, 7),
        (64, 64),
        (1000, 1000),
        (2999, 2999),
        (64, 1000),
        (1, 1000),
        (300, 128),
    ),
    "heads": ((4, 4), (8, 2), (8, 1)),
    "dtype": ("float64", "float32", "bfloat16"),
    "batch": (1, 3),
    "strategy": ("rows", "tile", "ring", "allgather", "heads", "mesh"),
    "head_groups": (1, 2, 4),
}
"""Values of each axis; lengths are (queries, keys), heads are (heads, kv_heads)."""

WHOLE = {**AXES, "strategy": ("rows",), "head_groups": (1,)}
"""The matrix itself: every combination of these."""

SMALL = {
    **AXES,
    "layout": ("contiguous", "striped", "explicit"),
    "ranks": (3, 4),
    "lengths": ((7, 7), (300, 128), (1000, 1000)),
    "heads": ((8, 2),),
    "dtype": ("float64", "bfloat16"),
    "batch": (1,),
}
EXTRA = (
    {**SMALL, "strategy": AXES["strategy"][1:], "head_groups": (1,)},
    {**SMALL, "strategy": ("rows", "tile"), "head_groups": (2, 4)},
)
"""And every combination of each of these: other strategies, and head ranges."""


@dataclass(frozen=True, order=True)
class Case:
    """One combination of the axes, in their order."""

    mask: str
    layout: str
    ranks: int
    lengths: tuple[int, int]
    heads: tuple[int, int]
    dtype: str
    batch: int
    strategy: str = "rows"
    head_groups: int = 1

    @property
    def key(self) -> str:
        """Its name in files and messages."""
        return (
            f"{self.mask}, {self.layout}, {self.ranks} ranks, {self.lengths[0]}x{self.lengths[1]}, "
            f"heads {self.heads[0]}/{self.heads[1]}, {self.dtype}, batch {self.batch}, "
            f"{self.strategy}, {self.head_groups} head groups"
        )

    def make_mask(self) -> Mask:
        """Its mask; InputError where the mask cannot serve the lengths."""
        return MASKS[self.mask](*self.lengths)

    def make_plan(self, mask: Mask) -> Plan:
        """Its plan; InputError where there is none."""
        q, kv = self.lengths
        named = self.layout != "explicit"
        return plan(
            mask,
            seqlen=q,
            kv_seqlen=kv,
            heads=self.heads[0],
            kv_heads=self.heads[1],
            head_dim=HEAD_DIM,
            dtype=self.dtype,
            ranks=self.ranks,
            strategy=self.strategy,
            layout=self.layout if named else mixed(q, self.ranks),
            kv_layout=None if named or q == kv else mixed(kv, self.ranks),
            head_groups=self.head_groups,
            effort="instant",
        )


def mixed(length: int, ranks: int) -> Layout:
    """An order of its own: uneven chunks, one of them empty, stripes, owners not in order."""
    cuts = sorted({0, length // 9, length // 4, length // 2, length})
    pieces = [Chunk(a, b) for a, b in itertools.pairwise(cuts)]
    if pieces and len(pieces[-1]) > 3:
        last = pieces.pop()
        pieces += [Chunk(last.start + 1, last.stop, 2), Chunk(last.start, last.stop, 2)]
    pieces = [*pieces[1:], *pieces[:1], Chunk(0, 0)]
    return explicit(length, ranks, pieces, [(5 * i + 2) % ranks for i in range(len(pieces))])


def product(axes: dict[str, tuple]) -> Iterator[Case]:
    """Every combination."""
    for values in itertools.product(*axes.values()):
        yield Case(*values)


def whole() -> list[Case]:
    """The whole matrix, in groups that share dense results, the cheapest lengths first."""
    cases = {case for axes in (WHOLE, *EXTRA) for case in product(axes)}

    def order(case: Case) -> tuple:
        q, kv = case.lengths
        return (
            q * kv,
            case.lengths,
            case.mask,
            case.heads,
            case.dtype,
            replace(case, batch=0),
            case,
        )

    return sorted(cases, key=order)


def impossible(case: Case) -> str | None:
    """Why there is no such case, or None."""
    try:
        mask = case.make_mask()
        mask.check(_lengths(case), case.heads[0])
    except InputError as error:
        return str(error)
    if case.strategy == "heads" and case.ranks > case.heads[0]:
        return f"strategy heads with {case.heads[0]} heads over {case.ranks} ranks"
    return None


def _lengths(case: Case) -> Lengths:
    return Lengths(*case.lengths)


Pair = tuple[tuple[str, object], tuple[str, object]]


def pairs(case: Case) -> Iterator[Pair]:
    """The pairs of axis values in a case."""
    values = [(field.name, value) for field, value in zip(fields(case), astuple(case), strict=True)]
    return itertools.combinations(values, 2)


LONG = (2999, 2999)
"""The covering subset has no time for every mask and batch at this length: the first ones do."""


def possible_pairs(axes: dict[str, tuple]) -> set[Pair]:
    """Every pair of values that some possible case holds: masks and lengths alone exclude any."""
    found: set[Pair] = set()
    for mask, lengths in itertools.product(axes["mask"], axes["lengths"]):
        if lengths == LONG and mask not in axes["mask"][:4]:
            continue
        first = Case(*({**first_of(axes), "mask": mask, "lengths": lengths}.values()))
        if impossible(first):
            continue
        for names in itertools.combinations(axes, 2):
            some = {**axes, "mask": (mask,), "lengths": (lengths,)}
            if lengths == LONG:
                some["batch"] = axes["batch"][:1]
            for a, b in itertools.product(some[names[0]], some[names[1]]):
                found.add(((names[0], a), (names[1], b)))
    return found


def first_of(axes: dict[str, tuple]) -> dict[str, object]:
    return {name: values[0] for name, values in axes.items()}


def covering(axes: dict[str, tuple], seed: int = 0, tries: int = 60) -> list[Case]:
    """Few cases that hold every possible pair of axis values; greedy, the same every time.

    Each next case is the best of some random ones around a pair that is not held yet; of equals
    the cheapest.
    """
    others = tuple(n for n in axes["lengths"] if n != LONG)
    draw = random.Random(seed)
    order = sorted(possible_pairs(axes), key=repr)
    left = dict.fromkeys(order)
    cases: list[Case] = []
    while left:
        (name, value), (other, second) = next(iter(left))
        candidates = []
        while len(candidates) < tries:
            values = {axis: draw.choice(options) for axis, options in axes.items()}
            values |= {name: value, other: second}
            if values["lengths"] == LONG and LONG not in (value, second):
                values["lengths"] = draw.choice(others)
            if values["lengths"] == LONG:
                values["batch"] = axes["batch"][0]
            case = Case(**values)
            if impossible_cached(case) is None:
                candidates.append(case)
        best = max(candidates, key=lambda c: (sum(p in left for p in pairs(c)), -cost(c)))
        cases.append(best)
        for pair in pairs(best):
            left.pop(pair, None)
    return sorted(cases, key=lambda case: (case.ranks, case))


_known: dict[tuple, str | None] = {}


def impossible_cached(case: Case) -> str | None:
    """As `impossible`; making some masks takes a while."""
    key = case.mask, case.lengths, case.heads, case.ranks, case.strategy
    if key not in _known:
        _known[key] = impossible(case)
    return _known[key]


def cost(case: Case) -> int:
    """Pairs to compute, about."""
    return case.lengths[0] * case.lengths[1] * case.heads[0] * case.batch


def by_ranks(cases: Iterable[Case]) -> dict[int, Sequence[Case]]:
    return {n: list(some) for n, some in itertools.groupby(cases, key=lambda case: case.ranks)}
