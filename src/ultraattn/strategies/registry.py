"""Names the rivals: how each is built, the layout it wants, and what it cannot serve."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ultraattn.errors import InputError
from ultraattn.plans.check import Pass
from ultraattn.plans.layout import Layout
from ultraattn.plans.plan import Place
from ultraattn.plans.problem import Problem
from ultraattn.plans.program import Block, Program
from ultraattn.strategies.allgather import allgather
from ultraattn.strategies.mesh import mesh
from ultraattn.strategies.rings import double_ring, heads, heads_ring, ring, rings_of

Build = Callable[..., Program]
"""``build(pass_, problem, q_layout, kv_layout, nodes, blocks)``, and ``shape`` where it has one."""
Shape = tuple[int, int]


@dataclass(frozen=True)
class Strategy:
    """A rival.

    `layout` names the layout that its authors use; any other serves too. `head_lanes` says
    whether ranks compute head ranges, so that blocks must be cut accordingly. `shaped` strategies
    have a variant for each factorisation of the ranks; `shape` is the chosen one, or None.
    """

    name: str
    function: Build
    layout: str
    about: str
    shaped: bool = False
    head_lanes: bool = False
    shape: Shape | None = None

    @property
    def label(self) -> str:
        """The name by which `by_name` finds it again, shape included."""
        return self.name if self.shape is None else f"{self.name}:{self.shape[0]}x{self.shape[1]}"

    def lanes(self, problem: Problem, ranks: int) -> int:
        """Head ranges that ranks compute apart; 1 where every rank computes all heads."""
        if not self.head_lanes:
            return 1
        return self.resolved(problem, ranks)[0] if self.shaped else ranks

    def head_groups(self, problem: Problem, ranks: int) -> int:
        """Ranges into which the heads of its blocks must be cut (`planning.blocks.blocks_of`)."""
        return self.lanes(problem, ranks)

    def resolved(self, problem: Problem, ranks: int) -> Shape:
        """Its shape, or the usual one where none is chosen.

        heads_ring: the most lanes that divide the ranks without copying key/value heads; mesh:
        the most square one, with at least as many columns as rows.
        """
        if self.shape is not None:
            return self.shape
        shapes = rings_of(ranks)
        if self.head_lanes:
            return max(s for s in shapes if s[0] <= problem.kv_heads)
        return max(s for s in shapes if s[0] <= s[1])

    def variants(self, problem: Problem, ranks: int) -> tuple[Strategy, ...]:
        """Every shape that can serve; itself where it has none or one is chosen already."""
        if not self.shaped or self.shape is not None:
            return (self,) if self.refusal(problem, ranks) is None else ()
        each = (dataclasses.replace(self, shape=shape) for shape in rings_of(ranks))
        return tuple(s for s in each if s.refusal(problem, ranks) is None)

    def refusal(self, problem: Problem, ranks: int) -> str | None:
        """Why it cannot serve, with what would fit; None where it can."""
        if self.shape is not None and self.shape[0] * self.shape[1] != ranks:
            fit = ", ".join(f"{a}x{b}" for a, b in rings_of(ranks))
            return (
                f"strategy {self.label} over {ranks} ranks: the product of both numbers must be "
                f"the number of ranks; one of {fit} would fit"
            )
        lanes = self.lanes(problem, ranks)
        if lanes > problem.heads:
            return (
                f"strategy {self.label} with {problem.heads} heads over {ranks} ranks: each of "
                f"{lanes} ranks computes at least one whole head; use at most {problem.heads} "
                "ranks, or heads_ring, ring or auto, which fit any number of heads"
            )
        return None

    def build(
        self,
        pass_: Pass,
        problem: Problem,
        q_layout: Layout,
        kv_layout: Layout,
        nodes: Sequence[int],
        blocks: Sequence[Block],
    ) -> Program:
        """The program of one pass.

        Raises:
            InputError: it cannot serve the problem, or blocks hold more heads than a rank.
        """
        refusal = self.refusal(problem, q_layout.ranks)
        if refusal is not None:
            raise InputError(refusal)
        more: dict[str, Any] = {}
        if self.shaped:
            more["shape"] = self.resolved(problem, q_layout.ranks)
        return self.function(pass_, problem, q_layout, kv_layout, nodes, blocks, **more)


_ALL = (
    Strategy("ring", ring, "contiguous", "keys pass every rank in a ring"),
    Strategy("zigzag", ring, "zigzag", "a ring, two mirrored pieces a rank"),
    Strategy("stripe", ring, "striped", "a ring, every N-th token a rank"),
    Strategy("allgather", allgather, "zigzag", "keys to all ranks, gradients reduce-scattered"),
    Strategy("heads", heads, "contiguous", "all-to-all from tokens to heads", head_lanes=True),
    Strategy(
        "heads_ring", heads_ring, "zigzag", "heads among U ranks, rings over R of them",
        shaped=True, head_lanes=True,
    ),
    Strategy("mesh", mesh, "contiguous", "tiles of an r x c mesh", shaped=True),
    Strategy("double_ring", double_ring, "zigzag", "a ring inside nodes and one between"),
)  # fmt: skip

NAMES: dict[str, Strategy] = {strategy.name: strategy for strategy in _ALL}
"""Every rival by name."""


def by_name(name: str) -> Strategy:
    """A rival by its name, with a shape where wanted: ``ring``, ``heads_ring:4x2``, ``mesh:2x4``.

    Raises:
        InputError: an unknown name or a malformed shape; lists the names.
    """
    base, colon, shape = name.partition(":")
    found = NAMES.get(base)
    if found is None:
        raise InputError(f"strategy {name!r}: expected one of {', '.join(NAMES)}")
    if not colon:
        return found
    first, _, second = shape.partition("x")
    if not (found.shaped and first.isdecimal() and second.isdecimal()):
        shaped = ", ".join(s.name for s in _ALL if s.shaped)
        raise InputError(
            f"strategy {name!r}: expected a shape of two numbers, as in mesh:2x4, and only after "
            f"one of {shaped}"
        )
    return dataclasses.replace(found, shape=(int(first), int(second)))


def build_pass(
    name: str,
    pass_: Pass,
    problem: Problem,
    q_layout: Layout,
    kv_layout: Layout,
    place: Place,
    blocks: Sequence[Block],
) -> Program:
    """The program of one pass by the rival called `name`; see `Strategy.build`.

    Blocks of `heads` and `heads_ring` must be cut into ``by_name(name).head_groups(...)`` ranges.
    """
    return by_name(name).build(pass_, problem, q_layout, kv_layout, place.node_of, blocks)
