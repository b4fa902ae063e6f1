"""Runs one pass of a plan on one rank: tasks in order of issue, transfers beside compute.

Receives are posted ahead, sends start as soon as what they carry is there, and nothing waits but
for what it reads. Because tasks are numbered so that every dependency points back, a rank that
follows the numbers cannot deadlock (`ultraattn.plans.program`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor as Array

from ultraattn.errors import RunError
from ultraattn.plans.account import collective_moves, parts_of
from ultraattn.plans.check import Pass
from ultraattn.plans.plan import RankPlan, RankProgram
from ultraattn.plans.program import (
    Collective,
    CollectiveOp,
    Compute,
    Local,
    LocalOp,
    Merge,
    Task,
    Transfer,
)
from ultraattn.plans.tensors import Tensor
from ultraattn.runtime.pieces import Pieces, copy_overlap, message_order, part_of, value_bytes
from ultraattn.runtime.reduce import fill, join_parts, merge
from ultraattn.runtime.session import Session
from ultraattn.runtime.tiles import Tiles
from ultraattn.runtime.transports import Handle
from ultraattn.runtime.workspace import Lease

Message = tuple[int, int, tuple[int, ...]]
"""(source, target, values in order) of one point-to-point message."""


@dataclass
class _Arrival:
    """A message that was posted and not yet waited for."""

    task: int
    source: int
    handle: Handle


class Execution:
    """One call of one pass on one rank.

    Args:
        session: the group's transport, workspace and watch.
        plan: what this rank loads of the plan.
        pass_: forward or backward.
        own: the caller's tensors, inputs and results, (batch, heads, local tokens, width).
        batch: batch entries.
        tiles: computes launches.
        timeout_s: the longest that a wait for a peer may last.
    """

    def __init__(
        self,
        session: Session,
        plan: RankPlan,
        pass_: Pass,
        own: dict[Tensor, Array],
        batch: int,
        tiles: Tiles,
        timeout_s: float,
    ) -> None:
        self._session = session
        self._pass = pass_
        self._program: RankProgram = plan.forward if pass_ is Pass.FORWARD else plan.backward
        self._widths = plan.problem.widths
        self._batch = batch
        self._tiles = tiles
        self._timeout_s = timeout_s
        values = self._program.values
        self._pieces = Pieces(own, plan.q_layout, plan.kv_layout, values, self._widths, batch)
        self._arrivals: dict[int, _Arrival] = {}
        self._leases: dict[int, list[Lease]] = defaultdict(list)
        self._shares: dict[int, int] = {}
        self._sends: list[tuple[int, int, Handle, Lease]] = []
        self._readers: dict[int, int] = defaultdict(int)
        self._lease_of: dict[int, tuple[Lease, list[int]]] = {}
        for task in self._program.tasks:
            for number in task.reads:
                if values[number].rank == session.rank:
                    self._readers[number] += 1
        self._run: dict[type[Task], Callable[..., None]] = {
            Compute: self._compute,
            Transfer: self._transfer,
            Collective: self._collective,
            Merge: self._merge,
            Local: self._local,
        }

    def run(self) -> None:
        """Runs every task of the rank; results stand in the caller's tensors afterwards.

        Raises:
            RunError: this rank's task failed, or a peer failed, died or hung; names the rank, its
                task and the cause.
        """
        watch = self._session.watch
        with watch.running():
            try:
                messages = {task.index: self._messages(task) for task in self._program.tasks}
                self._tag = self._number(messages)
                for task in self._program.tasks:
                    self._post_receives(task, messages[task.index])
                for task in self._program.tasks:
                    watch.now.task = self._name(task)
                    if self._session.trace is not None:
                        self._session.trace.append((str(self._pass), task.index))
                    self._step(task, messages[task.index])
                for task_index, target, handle, lease in self._sends:
                    self._wait(f"sending task {task_index}", target, handle)
                    self._session.workspace.give_back(lease)
            except RunError:
                raise
            except Exception as error:
                task_name = watch.now.task
                watch.failed(task_name, error)
                raise RunError(
                    f"rank {self._session.rank} failed in {task_name}: "
                    f"{type(error).__name__}: {error}"
                ) from error

    def _name(self, task: Task) -> str:
        return f"{self._pass} task {task.index} ({task.kind})"

    def _step(self, task: Task, messages: list[Message]) -> None:
        rank, values = self._session.rank, self._program.values
        for number in task.reads:
            if values[number].rank == rank:
                self._need(number)
        if isinstance(task, (Transfer, Collective)):
            self._run[type(task)](task, messages)
        else:
            self._run[type(task)](task)
        for number in task.reads:
            if values[number].rank == rank:
                self._readers[number] -= 1
                self._release(number)

    # Messages

    def _messages(self, task: Task) -> list[Message]:
        """The point-to-point messages of a task that this rank sends or receives."""
        values = self._program.values
        by_pair: dict[tuple[int, int], list[int]] = defaultdict(list)
        if isinstance(task, Transfer):
            for number in task.writes:
                by_pair[task.rank, values[number].rank].append(number)
        elif isinstance(task, Collective):
            for source, target, number in collective_moves(values, task):
                by_pair[source, target].append(number)
        rank = self._session.rank
        return [
            (source, target, tuple(message_order(numbers, values, self._widths)))
            for (source, target), numbers in sorted(by_pair.items())
            if rank in (source, target) and self._bytes(numbers)
        ]

    def _bytes(self, numbers: list[int] | tuple[int, ...]) -> int:
        values = self._program.values
        return sum(value_bytes(values[n], self._widths, self._batch) for n in numbers)

    def _number(self, messages: dict[int, list[Message]]) -> int:
        """Tags are task numbers past the tags of earlier calls: the same on every rank."""
        return self._session.tags(self._tiles.task_count(self._pass))

    def _post_receives(self, task: Task, messages: list[Message]) -> None:
        for source, target, numbers in messages:
            if target != self._session.rank:
                continue
            lease = self._session.workspace.borrow(self._bytes(numbers))
            tag = self._tag + task.index
            handle = self._session.transport.receive(source, lease.bytes, tag)
            arrival = _Arrival(task.index, source, handle)
            self._place(lease, numbers)
            for number in numbers:
                self._arrivals[number] = arrival

    def _place(self, lease: Lease, numbers: tuple[int, ...]) -> None:
        """Lets values stand side by side in a buffer, which goes back when none is read more."""
        at = 0
        alive = list(numbers)
        for number in numbers:
            size = self._bytes((number,))
            self._pieces.put(number, lease.bytes[at : at + size])
            self._lease_of[number] = (lease, alive)
            at += size

    def _send(self, task: int, target: int, numbers: tuple[int, ...], held: list[int]) -> None:
        """Packs values side by side and starts to send them."""
        values = self._program.values
        lease = self._session.workspace.borrow(self._bytes(numbers))
        packed = Pieces({}, self._pieces.q_layout, self._pieces.kv_layout, values, self._widths,
                        self._batch)  # fmt: skip
        at = 0
        for number in numbers:
            size = self._bytes((number,))
            place = packed.put(number, lease.bytes[at : at + size])
            source = next(
                n
                for n in held
                if values[n].rank == self._session.rank and values[n].holds(values[number])
            )
            place.copy_(part_of(self._pieces.get(source), values[source], values[number]))
            at += size
        handle = self._session.transport.send(target, lease.bytes, self._tag + task)
        self._sends.append((task, target, handle, lease))

    def _need(self, number: int) -> None:
        """Waits for a value that is on its way."""
        arrival = self._arrivals.pop(number, None)
        if arrival is None:
            return
        if any(other is arrival for other in self._arrivals.values()):
            for other in [n for n, a in self._arrivals.items() if a is arrival]:
                del self._arrivals[other]
        self._wait(f"{self._pass} task {arrival.task} (transfer)", arrival.source, arrival.handle)

    def _wait(self, task: str, peer: int, handle: Handle) -> None:
        watch = self._session.watch
        watch.now.waits_for = peer
        try:
            handle.wait(self._timeout_s)
        except RuntimeError as error:
            raise watch.explain(task, peer, error) from error
        finally:
            watch.now.waits_for = -1

    def _release(self, number: int) -> None:
        """Gives a value's buffer back when nothing on this rank reads it any more."""
        if self._readers[number] or number not in self._lease_of:
            return
        lease, alive = self._lease_of.pop(number)
        self._pieces.drop(number)
        alive.remove(number)
        if not alive:
            self._session.workspace.give_back(lease)

    # Tasks

    def _targets(self, task: Task) -> dict[int, Array]:
        """A place for every value that a task writes on this rank."""
        values = self._program.values
        places = {}
        for number in task.writes:
            value = values[number]
            if value.rank != self._session.rank:
                continue
            if value.buffer < 0:
                places[number] = self._pieces.get(number)
                continue
            self._place(self._session.workspace.borrow(self._bytes((number,))), (number,))
            places[number] = self._pieces.get(number)
        return places

    def _compute(self, task: Compute) -> None:
        self._tiles.run(self._pass, task, self._program, self._pieces, self._targets(task))

    def _transfer(self, task: Transfer, messages: list[Message]) -> None:
        for source, target, numbers in messages:
            if source == self._session.rank:
                self._send(task.index, target, numbers, list(task.reads))

    def _collective(self, task: Collective, messages: list[Message]) -> None:
        rank, values = self._session.rank, self._program.values
        for source, target, numbers in messages:
            if source == rank:
                self._send(task.index, target, numbers, list(task.reads))
        if task.op is CollectiveOp.REDUCE_SCATTER:
            for number in task.reads:
                if values[number].rank != rank:
                    self._need(number)
            places = self._targets(task)
            parts = {n: parts_of(values, task, values[n]) for n in places}
            merge(places, parts, values, self._pieces)
            for number in {n for found in parts.values() for n in found}:
                if values[number].rank != rank:
                    self._release(number)
            return
        arrived = {number for _, target, numbers in messages if target == rank for number in numbers}
        for number in arrived:
            self._need(number)
        for number in task.writes:
            value = values[number]
            if value.rank == rank and number not in arrived:
                place = self._targets_of_copy(number)
                source = next(
                    n for n in task.reads if values[n].rank == rank and values[n].holds(value)
                )
                copy_overlap(place, value, self._pieces.get(source), values[source])

    def _targets_of_copy(self, number: int) -> Array:
        self._place(self._session.workspace.borrow(self._bytes((number,))), (number,))
        return self._pieces.get(number)

    def _merge(self, task: Merge) -> None:
        values = self._program.values
        places = self._targets(task)
        parts = {
            number: [
                n
                for n in task.reads
                if values[n].tensor == values[number].tensor
                and values[n].chunk == values[number].chunk
            ]
            for number in places
        }
        merge(places, parts, values, self._pieces)

    def _local(self, task: Local) -> None:
        places = self._targets(task)
        values = self._program.values
        if task.op is LocalOp.FILL:
            fill(places, values)
        elif task.op is LocalOp.DELTA:
            self._delta(task, places)
        else:
            join_parts(places, task.reads, values, self._pieces)

    def _delta(self, task: Local, places: dict[int, Array]) -> None:
        """delta = rowsum(dO * O), less the gradient of the LSE where the caller has one."""
        values = self._program.values
        for number, place in places.items():
            value = values[number]
            heads = (value.head_start, value.head_stop)
            dout = self._pieces.assemble(task.reads, Tensor.DO, value.chunk, heads)
            out = self._pieces.assemble(task.reads, Tensor.O, value.chunk, heads)
            place.copy_((dout.to(place.dtype) * out.to(place.dtype)).sum(-1))
            if Tensor.DELTA in self._pieces.own:
                start = self._pieces.q_layout.offsets[value.chunk]
                rows = slice(start + value.row_start, start + value.row_stop)
                place.sub_(self._pieces.own[Tensor.DELTA][:, heads[0] : heads[1], rows])
