"""Turns one rank's program into steps, worked out once for all calls: what each task waits for,
sends, fills and frees.

A note on rooms. Values that stand side by side in one borrowed buffer form a room: those of one
message, or one value that a task writes.

    task 7 (transfer, rank 0 -> rank 2)      task 9 (compute on rank 2)

    rank 0: packs k, v into a room,          reads k, v: waits for the room's message,
            sends the room                   then the room goes back, for nothing reads it later
    rank 2: posts a receive into a room

Sizes are in bytes for one batch entry; a call multiplies them by its batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ultraattn.plans.account import collective_moves, parts_of
from ultraattn.plans.passes import Pass
from ultraattn.plans.plan import RankPlan
from ultraattn.plans.program import (
    Collective,
    CollectiveOp,
    Compute,
    Local,
    LocalOp,
    Merge,
    Task,
    Transfer,
    Value,
)
from ultraattn.plans.rank_program import RankProgram
from ultraattn.plans.tensors import Widths
from ultraattn.runtime.keeping import Keeping
from ultraattn.runtime.pieces import message_order, value_bytes


@dataclass(frozen=True)
class Room:
    """Values side by side in one buffer."""

    index: int
    """Its number among the rooms of a pass on this rank."""
    numbers: tuple[int, ...]
    edges: tuple[int, ...]
    """Value i stands in bytes [edges[i], edges[i + 1])."""

    @property
    def bytes(self) -> int:
        """Bytes of all its values."""
        return self.edges[-1]


@dataclass(frozen=True)
class Message:
    """One point-to-point message of a task, as one of its two ranks sees it."""

    task: int
    name: str
    """The task, for messages to people."""
    peer: int
    room: Room
    sources: tuple[int, ...] = ()
    """For the sender: the value from which each value of the room is copied."""


@dataclass(frozen=True)
class Step:
    """What this rank does for one task."""

    task: Task
    name: str
    waits: tuple[int, ...]
    """Receives that must have arrived before it begins."""
    sends: tuple[Message, ...]
    arrivals: tuple[int, ...]
    """Receives of its own that it reads: a collective's, waited for once its sends are out."""
    rooms: tuple[Room, ...]
    """Rooms for the values that it writes."""
    writes: tuple[int, ...]
    """Values that it fills on this rank, in `rooms` or in the caller's tensors."""
    parts: Mapping[int, tuple[int, ...]]
    """For each value that it fills, the values that go into it (not for launches)."""
    frees: tuple[int, ...]
    """Rooms that nothing reads once it is done."""
    final: bool = False
    """Whether it is a merge into the caller's tensors, which no other step reads."""

    @property
    def reads(self) -> tuple[int, ...]:
        """The values that go into what it fills, for others than launches."""
        return tuple(n for some in self.parts.values() for n in some)


@dataclass(frozen=True)
class Steps:
    """One pass of a plan on one rank."""

    pass_: Pass
    rank: int
    program: RankProgram
    widths: Widths
    steps: tuple[Step, ...]
    receives: tuple[Message, ...]
    """In ascending order of task."""
    outputs: tuple[tuple[int, int], ...]
    """(receive, value) of results that arrive by message and belong in the caller's tensors."""
    left: tuple[int, ...]
    """Rooms that no step frees, since nothing reads them."""
    tags: int
    """Message tags that a call needs: tasks of the pass, all ranks together."""
    kept: Keeping
    """What stands from forward to backward: forward fills it, backward reads it."""


def steps_of(pass_: Pass, plan: RankPlan, tags: int, *, early: bool = False) -> Steps:
    """The steps of one rank in one pass.

    Args:
        pass_: the pass.
        plan: what the rank loads of the plan.
        tags: tasks of the pass, all ranks together.
        early: final merges stand right behind the last launch that they need, for a device that
            runs them beside later launches; else in the order of the program.
    """
    return _Maker(pass_, plan, tags).make(early)


class _Maker:
    def __init__(self, pass_: Pass, plan: RankPlan, tags: int) -> None:
        self.pass_, self.widths, self.tags = pass_, plan.problem.widths, tags
        self.program = program = plan.forward if pass_ is Pass.FORWARD else plan.backward
        self.rank, self.values = program.rank, program.values
        self.kept = Keeping.of(plan.kept, self.widths)
        self.rooms: list[Room] = []
        self.room_of: dict[int, int] = {}
        self.receives: list[Message] = []
        self.receive_of: dict[int, int] = {}

    def make(self, early: bool) -> Steps:
        drafts = [self.step(task) for task in self.program.tasks]
        read = {n for task in self.program.tasks for n in task.reads}
        drafts = [
            replace(
                step,
                final=isinstance(step.task, Merge)
                and all(self.values[n].buffer < 0 and n not in read for n in step.writes),
            )
            for step in drafts
        ]
        if early:
            drafts = _hoisted(drafts)
        last = self.last_reads(drafts)
        frees: list[list[int]] = [[] for _ in drafts]
        for room, index in sorted(last.items()):
            frees[index].append(room)
        outputs = tuple(
            (index, number)
            for number, index in self.receive_of.items()
            if self.values[number].rank == self.rank and self.values[number].buffer < 0
        )
        return Steps(
            pass_=self.pass_,
            rank=self.rank,
            program=self.program,
            widths=self.widths,
            steps=tuple(
                replace(step, frees=tuple(rooms)) for step, rooms in zip(drafts, frees, strict=True)
            ),
            receives=tuple(self.receives),
            outputs=outputs,
            left=tuple(sorted(set(self.room_of.values()) - set(last))),
            tags=self.tags,
            kept=self.kept,
        )

    def step(self, task: Task) -> Step:
        """A task's step, without what it frees; registers its rooms and receives."""
        name = f"{self.pass_} task {task.index} ({task.kind})"
        mine = [n for n in task.reads if self.values[n].rank == self.rank]
        waits = dict.fromkeys(self.receive_of[n] for n in mine if n in self.receive_of)
        sends, first = [], len(self.receives)
        for source, target, numbers in self.messages(task):
            if source == self.rank:
                sends.append(self.sent(task, name, target, numbers))
            else:
                self.receive(task, name, source, numbers)
        arrivals = range(first, len(self.receives)) if isinstance(task, Collective) else ()
        writes = tuple(
            n for n in task.writes if self.values[n].rank == self.rank and n not in self.receive_of
        )
        rooms = tuple(self.room([n]) for n in writes if self.values[n].buffer >= 0)
        self.room_of |= {room.numbers[0]: room.index for room in rooms}
        parts = {n: self.parts(task, n) for n in writes}
        return Step(
            task, name, tuple(waits), tuple(sends), tuple(arrivals), rooms, writes, parts, ()
        )

    def messages(self, task: Task) -> list[tuple[int, int, list[int]]]:
        """(source, target, values) of each message of a task that this rank sends or receives."""
        by_pair: dict[tuple[int, int], list[int]] = defaultdict(list)
        if isinstance(task, Transfer):
            for number in task.writes:
                by_pair[task.rank, self.values[number].rank].append(number)
        elif isinstance(task, Collective):
            for source, target, number in collective_moves(self.values, task):
                by_pair[source, target].append(number)
        return [
            (source, target, numbers)
            for (source, target), numbers in sorted(by_pair.items())
            if self.rank in (source, target) and source != target
        ]

    def room(self, numbers: Sequence[int]) -> Room:
        edges = [0]
        for number in numbers:
            edges.append(edges[-1] + value_bytes(self.values[number], self.widths, 1))
        room = Room(len(self.rooms), tuple(numbers), tuple(edges))
        self.rooms.append(room)
        return room

    def sent(self, task: Task, name: str, target: int, numbers: Iterable[int]) -> Message:
        """A message whose values are copied from those that the task reads on this rank."""
        ordered = message_order(list(numbers), self.values, self.widths)
        mine = [n for n in task.reads if self.values[n].rank == self.rank]
        sources = tuple(
            next(n for n in mine if self.values[n].holds(self.values[number])) for number in ordered
        )
        return Message(task.index, name, target, self.room(ordered), sources)

    def receive(self, task: Task, name: str, source: int, numbers: Iterable[int]) -> None:
        room = self.room(message_order(list(numbers), self.values, self.widths))
        for number in room.numbers:
            self.receive_of[number] = len(self.receives)
            self.room_of[number] = room.index
        self.receives.append(Message(task.index, name, source, room))

    def parts(self, task: Task, number: int) -> tuple[int, ...]:
        """The values that go into a value that this rank fills."""
        value = self.values[number]
        if isinstance(task, Compute) or (isinstance(task, Local) and task.op is LocalOp.FILL):
            return ()
        if isinstance(task, Local) and task.op is LocalOp.DELTA:
            return task.reads
        if isinstance(task, Collective) and task.op is CollectiveOp.REDUCE_SCATTER:
            return tuple(parts_of(self.values, task, value))
        if isinstance(task, (Merge, Local)):
            return tuple(n for n in task.reads if _same_chunk(self.values[n], value))
        return next(
            (n,)
            for n in task.reads
            if self.values[n].rank == self.rank and self.values[n].holds(value)
        )

    def last_reads(self, steps: Sequence[Step]) -> dict[int, int]:
        """For each room that is read, the step that reads it last."""
        last: dict[int, int] = {}
        for index, step in enumerate(steps):
            mine = [n for n in step.task.reads if self.values[n].rank == self.rank]
            for number in (*mine, *(n for some in step.parts.values() for n in some)):
                if number in self.room_of:
                    last[self.room_of[number]] = index
        return last


def _hoisted(steps: Sequence[Step]) -> list[Step]:
    """Final merges right behind the last step that fills what they read; the rest as it is."""
    filled = {n: index for index, step in enumerate(steps) for n in step.writes}
    behind: dict[int, list[Step]] = defaultdict(list)
    for step in steps:
        if step.final:
            behind[max((filled[n] for n in step.reads if n in filled), default=-1)].append(step)
    found = list(behind[-1])
    for index, step in enumerate(steps):
        if not step.final:
            found += [step, *behind[index]]
    return found


def _same_chunk(a: Value, b: Value) -> bool:
    return a.tensor == b.tensor and a.chunk == b.chunk
