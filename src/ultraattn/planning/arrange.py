"""Arranges a pass: how much each launch and message holds, then the order of everything.

The stage between the dependency graph and the plan (article, chapters 6 and 7): launches and
messages are joined by when they can run (`coarsen`) and where the cluster's costs favour it
(`fusion`), then every stream's order is fixed by the schedule of least makespan (`schedule`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ultraattn.cluster.costs import Costs
from ultraattn.planning.coarsen import coarser
from ultraattn.planning.dependency_graph import build_finest
from ultraattn.planning.fusion import Fuser, How, groups_like
from ultraattn.planning.fusion_candidates import KernelLimits
from ultraattn.planning.fusion_costs import cost_of, durations_of, quantum_of, task_seconds
from ultraattn.planning.graph import Held
from ultraattn.planning.schedule import schedule
from ultraattn.planning.schedule_program import jobs_of, reorder
from ultraattn.planning.tiling import Effort
from ultraattn.plans.layout import Layout
from ultraattn.plans.passes import Pass
from ultraattn.plans.problem import Problem
from ultraattn.plans.program import Block, Program
from ultraattn.simulation import simulate_pass
from ultraattn.simulation.durations import Tiles, launch_seconds

MOST_BLOCKS = {Effort.INSTANT: 0, Effort.FAST: 0, Effort.NORMAL: 64, Effort.BEST: 320}
"""Blocks up to which every block is first a launch of its own; else launches stay as they are."""
MOST_TRIED = 100
"""Choices of launches to join that are predicted at `normal`, beyond which none is taken back. Of
10 passes over 8 ranks none was better by more than 0.02 % with 250."""
CLOSE = 1.005
"""What takes at most so many times its busiest rank's work in one launch is joined no further."""
MOST_JOINED = 10_000
"""Tasks up to which launches are joined by when they can run: about a second's work."""
FEW_TASKS, LONG = 1_000, 50
"""Beyond so many tasks, launches that take more than so many starts in the mean are not joined."""
MOST_TASKS = {Effort.INSTANT: 0, Effort.FAST: 500, Effort.NORMAL: 2_000, Effort.BEST: 10_000}
"""Tasks up to which the order is scheduled."""


@dataclass(frozen=True, eq=False)
class Arranged:
    """A program, its simulated time, and what a reader of the plan should know of it."""

    program: Program
    time_ns: int
    notes: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Arranger:
    """Arranges the passes of one problem on one place.

    Attributes:
        pass_: forward or backward.
        problem: shapes and dtype.
        q_layout: chunks of queries.
        kv_layout: chunks of keys.
        nodes: the node of each rank.
        costs: of the cluster.
        held: what ranks hold before the pass begins.
    """

    pass_: Pass
    problem: Problem
    q_layout: Layout
    kv_layout: Layout
    nodes: Sequence[int]
    costs: Costs
    held: Held = field(default_factory=dict)

    def best(
        self, blocks: Sequence[Block], ranks: Sequence[int], by_arrival: Program, effort: Effort
    ) -> Arranged:
        """The fastest arrangement, simulated, in which ``ranks[b]`` computes ``blocks[b]``.

        Compared is all that `quick` and `deep` give; so none is ever slower than what was given.
        `instant` compares nothing.
        """
        found = self.quick(by_arrival, effort)
        found += self.deep(blocks, ranks, found, effort)
        return fastest(found)

    def quick(
        self, by_arrival: Program, effort: Effort, order: Effort | None = None
    ) -> list[Arranged]:
        """`by_arrival` as it is, its launches joined by when they can run, the fastest in order.

        The first is `by_arrival`; further ones follow unless the effort is `instant`. `order` is
        how hard to look for the order, where that is another effort.
        """
        found = [self.timed(by_arrival, ())]
        if effort is Effort.INSTANT or not len(by_arrival.blocks.kind):
            return found
        found += self.coarse(by_arrival)
        return found + self.ordered(found, effort, order or effort)

    def ordered(self, found: Sequence[Arranged], effort: Effort, order: Effort) -> list[Arranged]:
        """The first and the fastest of these in scheduled order, where tasks are not too many."""
        return [
            self.scheduled(one.program, one.notes, order)
            for one in dict.fromkeys((found[0], fastest(found)))
            if len(one.program.tasks.rank) <= MOST_TASKS[effort]
        ]

    def deep(
        self,
        blocks: Sequence[Block],
        ranks: Sequence[int],
        quick: Sequence[Arranged],
        effort: Effort,
    ) -> list[Arranged]:
        """Single blocks, and launches and messages joined by the costs, both in scheduled order.

        `quick` is what the method of that name gave. Nothing where blocks are many.
        """
        if not 0 < len(blocks) <= MOST_BLOCKS[effort]:
            return []
        if fastest(quick).time_ns <= CLOSE * self._work_s(blocks, ranks) * 1e9:
            return []
        finest = build_finest(*self._given, blocks, ranks, self.held)
        found = []
        if len(finest.tasks.rank) <= MOST_TASKS[effort]:
            found.append(self.scheduled(finest, ("launches: a block each",), effort))
        starts = (quick[0].program, fastest(quick).program)
        fused, note = self.fused(finest, starts, effort)
        return [*found, self.scheduled(fused, (note,), effort)]

    def coarse(self, by_arrival: Program) -> list[Arranged]:
        """Every way to join launches by when they can run.

        None of a very large program, nor of a large one whose launches are long: all that joining
        spares is their starts.
        """
        tasks = by_arrival.tasks
        if len(tasks.rank) > MOST_JOINED:
            return []
        if len(tasks.rank) > FEW_TASKS:
            launches = np.diff(tasks.tile.offsets) > 0
            seconds = task_seconds(*self._given, by_arrival, self.costs)[launches]
            if 0 < LONG * self._start_s < seconds.mean():
                return []
        return [
            self.timed(made, (_launches_note(made, by_arrival, f"joined by arrival ({name})"),))
            for name, made in coarser(by_arrival, self.problem, self.nodes)
        ]

    def _work_s(self, blocks: Sequence[Block], ranks: Sequence[int]) -> float:
        """Kernel seconds of the busiest rank, with all of its blocks in one launch."""
        count = self.q_layout.ranks
        tiles = Tiles.of(blocks, ranks)
        given = self.problem, self.q_layout, self.kv_layout
        return float(launch_seconds(str(self.pass_), *given, tiles, count, self.costs).max())

    @property
    def _start_s(self) -> float:
        """The shortest start of a launch, as far as it is known; else 0."""
        starts = [kernel.start_s(str(self.pass_)) for kernel in self.costs.kernels]
        return min((start for start in starts if start), default=0.0)

    def timed(self, program: Program, notes: tuple[str, ...]) -> Arranged:
        """With its simulated time, in whole nanoseconds."""
        return Arranged(program, round(self._simulated_s(program) * 1e9), notes)

    def scheduled(self, program: Program, notes: tuple[str, ...], effort: Effort) -> Arranged:
        """The same tasks, every stream in the order of the least makespan found."""
        seconds = task_seconds(*self._given, program, self.costs)
        found = schedule(jobs_of(program, durations_of(seconds)), effort)
        state = "proved least" if found.proved else f"gap {100 * found.gap:.1f} %"
        note = f"order: {found.origin}, {state} for these launches"
        return self.timed(reorder(program, found), (*notes, note))

    def fused(
        self, finest: Program, starts: Sequence[Program], effort: Effort
    ) -> tuple[Program, str]:
        """Launches and messages joined where the costs favour it, and a note on it.

        The search starts from single blocks, and from launches like those of `starts`, of which
        the first has them by arrival.

        A launch may hold any blocks: where a kernel takes rectangles alone, the runtime calls it
        for each, and the costs count these calls.
        """
        quantum = quantum_of(task_seconds(*self._given, finest, self.costs))
        fuser = Fuser(
            finest,
            self.problem,
            self.nodes,
            cost_of(*self._given, self.costs, quantum),
            KernelLimits(),
            seeds=[groups_like(finest, start) for start in starts],
        )
        rounds, most = (2, None) if effort is Effort.BEST else (1, MOST_TRIED)
        fused = fuser.choose(How.SEARCH, rounds, most).program
        return fused, _launches_note(fused, starts[0], "joined by their costs")

    @property
    def _given(self) -> tuple[Pass, Problem, Layout, Layout, Sequence[int]]:
        return self.pass_, self.problem, self.q_layout, self.kv_layout, self.nodes

    def _simulated_s(self, program: Program) -> float:
        return simulate_pass(*self._given, program, self.costs).makespan_s


def fastest(found: Sequence[Arranged]) -> Arranged:
    """The first of least simulated time."""
    return min(found, key=lambda arranged: arranged.time_ns)


def _launches_note(program: Program, by_arrival: Program, how: str) -> str:
    return (
        f"launches {how}: {_launches(program)} for {len(program.blocks.kind)} blocks, where "
        f"arrival alone gives {_launches(by_arrival)}"
    )


def _launches(program: Program) -> int:
    return int(np.count_nonzero(np.diff(program.tasks.tile.offsets)))
