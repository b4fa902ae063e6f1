"""Turns a program of small tasks into one of larger tasks, where the predicted whole gets shorter.

A candidate's gain is the time of its parts less the time of the whole. As in the article (section
6.5), candidates are tried by falling gain: one that touches tasks already joined is skipped, one
that does not make the whole better is taken back. Better is a shorter predicted pass, or one as
long with less work in it, since joining two messages may shorten nothing until the launches that
wait for them are joined too.

`search` looks further: it starts from several orders of the candidates, takes single choices back
and tries others in their place. `exhaustive` tries every choice of up to 12 candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ultraattn.enums import StrEnum
from ultraattn.errors import InputError
from ultraattn.planning.fusion_candidates import KernelLimits, LinkLimits, candidates
from ultraattn.planning.fusion_graph import (
    Graph,
    Group,
    Node,
    Tasks,
    Work,
    contract,
    joined,
)
from ultraattn.planning.list_schedule import predict
from ultraattn.plans.problem import Problem
from ultraattn.plans.program import Program, TaskKind, Value

Cost = Callable[[Sequence[Work]], Sequence[int]]
"""The duration of each work, at least 1, in a quantum of the caller's."""

Score = tuple[int, int]
"""Predicted length of the pass, and the duration of all its tasks."""

EXHAUSTIVE = 12
"""The most candidates of which every choice is tried."""


class How(StrEnum):
    """How fusions are chosen."""

    GREEDY = "greedy"
    SEARCH = "search"
    EXHAUSTIVE = "exhaustive"


@dataclass(frozen=True)
class Candidate:
    """A group, and what joining it gains if nothing else mattered."""

    group: Group
    gain: int


@dataclass(frozen=True, eq=False)
class Fusion:
    """The outcome: a program, and what joining tasks won."""

    program: Program
    groups: tuple[Group, ...]
    """What was joined; tasks of the program given."""
    before: int
    """Predicted length of the pass without."""
    after: int
    """Predicted length of the pass with."""
    tried: int
    """Graphs that were predicted."""


class Fuser:
    """Chooses fusions of one program.

    Args:
        program: a pass, its tasks as small as they may be.
        problem: what it computes.
        nodes: the node of each rank.
        cost: durations; asked once for each new task.
        kernel: what one launch may hold.
        link: what one message may hold.
        most: the most candidates that are considered, those of the largest gain.
        seeds: choices of groups from elsewhere (see `groups_like`) from which `search` also starts.
    """

    def __init__(
        self,
        program: Program,
        problem: Problem,
        nodes: Sequence[int],
        cost: Cost,
        kernel: KernelLimits | None = None,
        link: LinkLimits | None = None,
        most: int = 1_000,
        seeds: Sequence[Sequence[Group]] = (),
    ) -> None:
        self._program, self._problem, self._nodes, self._cost = program, problem, nodes, cost
        self._tasks = Tasks(program)
        self._known: dict[tuple[object, ...], int] = {}
        self._scores: dict[tuple[int, ...], Score | None] = {}
        self.tried = 0
        kernel = kernel or KernelLimits()
        groups = candidates(program, kernel, link or LinkLimits())
        gained = self._gains(groups)
        order = sorted(range(len(groups)), key=lambda i: (-gained[i], i))
        found = [Candidate(groups[i], gained[i]) for i in order[:most] if gained[i] > 0]
        known = {candidate.group: place for place, candidate in enumerate(found)}
        allowed = [[g for g in seed if self._taken(g, kernel)] for seed in seeds]
        extra = list(dict.fromkeys(g for seed in allowed for g in seed if g not in known))
        self._first = len(found)
        for group, gain in zip(extra, self._gains(extra), strict=True):
            known[group] = len(found)
            found.append(Candidate(group, gain))
        self.candidates = tuple(found)
        self._seeds = [[known[group] for group in seed] for seed in allowed]

    def _taken(self, group: Group, kernel: KernelLimits) -> bool:
        blocks = self._program.block_views
        tile = [blocks[block] for task in group.tasks for block in self._tasks.tile[task]]
        return kernel.takes(tile)

    def choose(
        self, how: How = How.GREEDY, rounds: int = 2, most_tried: int | None = None
    ) -> Fusion:
        """The fused program.

        Args:
            how: greedy, search or exhaustive.
            rounds: how often `search` takes back every choice in turn.
            most_tried: graphs after whose prediction `search` takes back no further choice.

        Raises:
            InputError: `exhaustive` with more than 12 candidates.
        """
        if how is How.EXHAUSTIVE:
            chosen = self._exhaustive()
        elif how is How.SEARCH:
            chosen = self._search(rounds, most_tried)
        else:
            chosen = self._greedy(range(self._first))
        return self.result(chosen)

    def result(self, chosen: Sequence[int]) -> Fusion:
        """The program with these candidates joined; they must apply together."""
        groups = tuple(self.candidates[i].group for i in sorted(chosen))
        graph = contract(self._tasks, groups)
        before, after = self.score(()), self.score(chosen)
        if graph is None or before is None or after is None:
            raise InputError(f"candidates {sorted(chosen)} do not apply together; choose others")
        made = graph.finish(self._problem, self._nodes)
        return Fusion(made, groups, before[0], after[0], self.tried)

    def score(self, chosen: Sequence[int]) -> Score | None:
        """How good a choice is, less is better; None where it does not apply."""
        key = tuple(sorted(chosen))
        if key not in self._scores:
            groups = [self.candidates[i].group for i in key]
            tasks = [task for group in groups for task in group.tasks]
            graph = contract(self._tasks, groups) if len(set(tasks)) == len(tasks) else None
            self._scores[key] = None if graph is None else self._predict(graph)
        return self._scores[key]

    def _predict(self, graph: Graph) -> Score:
        self.tried += 1
        durations = self._durations(graph, graph.nodes)
        return predict(graph.jobs(durations, self._nodes)), sum(durations)

    def _durations(self, graph: Graph, nodes: Sequence[Node]) -> list[int]:
        return self._durations_of([(graph, node) for node in nodes])

    def _durations_of(self, nodes: Sequence[tuple[Graph, Node]]) -> list[int]:
        """Of nodes; tasks that were met before are not asked about again."""
        keys: list[tuple[object, ...]] = []
        asked: dict[tuple[object, ...], Work] = {}
        for graph, node in nodes:
            key = (node.kind, node.op, *node.members, -1, *self._joined(graph, node))
            keys.append(key)
            if key not in self._known and key not in asked:
                asked[key] = graph.work(node)
        for key, duration in zip(asked, self._cost(list(asked.values())), strict=True):
            if duration < 1:
                raise InputError(
                    f"a task of {asked[key].kind} costs {duration}: expected an integer of at "
                    "least 1; use a finer quantum"
                )
            self._known[key] = int(duration)
        return [self._known[key] for key in keys]

    def _joined(self, graph: Graph, node: Node) -> list[Value]:
        """Values of a node that came from joining launches: the rest follows from its members."""
        first = len(self._program.values.rank)
        return [graph.values[v] for v in (*node.reads, *node.writes) if v >= first]

    def _gains(self, groups: Sequence[Group]) -> list[int]:
        """Parts less the whole, merges that become needless among the parts; 0 where it cannot."""
        plain = contract(self._tasks, ())
        assert plain is not None
        alone = self._durations(plain, plain.nodes)
        of_task = {
            node.members[0]: duration for node, duration in zip(plain.nodes, alone, strict=True)
        }
        made = [joined(self._tasks, group) for group in groups]
        works = [found for found in made if found is not None]
        whole = iter(self._durations_of(works))
        return [
            0 if found is None else sum(of_task[task] for task in found[1].members) - next(whole)
            for found in made
        ]

    # Choosing

    def _greedy(self, order: Sequence[int], start: Sequence[int] = ()) -> list[int]:
        """Tries candidates in order, on top of `start`; keeps those that make it better."""
        chosen = list(start)
        taken = {task for i in chosen for task in self.candidates[i].group.tasks}
        best = self.score(chosen)
        assert best is not None
        for index in order:
            tasks = self.candidates[index].group.tasks
            if taken.intersection(tasks):
                continue
            score = self.score([*chosen, index])
            if score is not None and score < best:
                chosen.append(index)
                taken.update(tasks)
                best = score
        return chosen

    def _search(self, rounds: int, most_tried: int | None) -> list[int]:
        """Greedy from several orders, then every choice taken back or replaced in turn."""
        all_of = range(len(self.candidates))
        size = [len(candidate.group.tasks) for candidate in self.candidates]
        gain = [candidate.gain for candidate in self.candidates]
        orders = [
            list(all_of),
            sorted(all_of, key=lambda i: (-size[i], -gain[i], i)),
            sorted(all_of, key=lambda i: (size[i], -gain[i], i)),
            sorted(all_of, key=lambda i: (-gain[i] * 1024 // size[i], i)),
        ]
        starts = [self._greedy(order) for order in orders]
        starts += [self._greedy(all_of, seed) for seed in self._seeds if self.score(seed)]
        best = min(starts, key=self._rank)
        for _ in range(rounds):
            again = best
            for index in [*best, *(i for i in all_of if i not in best)]:
                if most_tried is not None and self.tried >= most_tried:
                    break
                again = min(again, self._toggled(again, index), key=self._rank)
            if self._rank(again) == self._rank(best):
                break
            best = again
        return best

    def _toggled(self, chosen: list[int], index: int) -> list[int]:
        """The choice without a candidate, or with it in place of those it touches; refilled."""
        if index in chosen:
            start = [i for i in chosen if i != index]
        else:
            tasks = set(self.candidates[index].group.tasks)
            apart = [i for i in chosen if not tasks.intersection(self.candidates[i].group.tasks)]
            start = [*apart, index]
        if self.score(start) is None:
            return chosen
        return self._greedy([i for i in range(len(self.candidates)) if i != index], start)

    def _rank(self, chosen: Sequence[int]) -> tuple[Score, tuple[int, ...]]:
        score = self.score(chosen)
        assert score is not None
        return score, tuple(sorted(chosen))

    def _exhaustive(self) -> list[int]:
        count = len(self.candidates)
        if count > EXHAUSTIVE:
            raise InputError(
                f"{count} candidates: every choice is tried of up to {EXHAUSTIVE}; use search"
            )
        choices = (
            [i for i in range(count) if bits >> i & 1]
            for bits in range(2**count)
        )  # fmt: skip
        return min((c for c in choices if self.score(c) is not None), key=self._rank)


def groups_like(program: Program, coarse: Program) -> list[Group]:
    """The groups of a program's launches that make it launch what another of its pass launches."""
    task_of = {
        block: task
        for task, tile in enumerate(program.tasks.tile.rows())
        for block in tile
    }  # fmt: skip
    tiles = ({task_of[block] for block in tile} for tile in coarse.tasks.tile.rows())
    return [Group(tuple(sorted(tile)), TaskKind.COMPUTE) for tile in tiles if len(tile) > 1]


def fuse(
    program: Program,
    problem: Problem,
    nodes: Sequence[int],
    cost: Cost,
    kernel: KernelLimits | None = None,
    link: LinkLimits | None = None,
    how: How = How.GREEDY,
) -> Fusion:
    """Joins launches and messages of a program where that makes the predicted pass better."""
    return Fuser(program, problem, nodes, cost, kernel, link).choose(how)
