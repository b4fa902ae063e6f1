"""Runs one pass of a plan on one rank: steps in order of issue, transfers beside compute.

Receives are posted ahead, sends start as soon as what they carry is there, and nothing waits but
for what it reads. Because tasks are numbered so that every dependency points back, a rank that
follows the numbers cannot deadlock (`ultraattn.plans.program`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import pairwise

from torch import Tensor as Array

from ultraattn.errors import RunError
from ultraattn.plans.layout import Layout
from ultraattn.plans.program import Collective, CollectiveOp, Compute, Local, LocalOp, Merge
from ultraattn.plans.tensors import Tensor
from ultraattn.runtime.pieces import Pieces, part_of
from ultraattn.runtime.reduce import delta, fill, join_parts, merge
from ultraattn.runtime.session import Session
from ultraattn.runtime.steps import Message, Room, Step, Steps
from ultraattn.runtime.tiles import Tiles
from ultraattn.runtime.transports import Handle
from ultraattn.runtime.workspace import Lease

AHEAD = 32
"""Receives that are posted before they are needed: enough to keep links busy, not all memory."""


class Execution:
    """One call of one pass on one rank.

    Args:
        session: the group's transport, workspace and watch.
        steps: what this rank does.
        layouts: of queries and of keys.
        own: the caller's tensors, inputs and results, (batch, heads, local tokens, width).
        batch: batch entries.
        tiles: computes launches.
        timeout_s: the longest that a wait for a peer may last.
        call: the call, for messages to people; all ranks give the same text.
    """

    def __init__(
        self,
        session: Session,
        steps: Steps,
        layouts: tuple[Layout, Layout],
        own: dict[Tensor, Array],
        batch: int,
        tiles: Tiles,
        timeout_s: float,
        call: str,
    ) -> None:
        self._session = session
        self._steps = steps
        self._batch = batch
        self._tiles = tiles
        self._timeout_s = timeout_s
        self._call = call
        self._values = steps.program.values
        self._pieces = Pieces(own, *layouts, self._values, steps.widths, batch)
        self._tag = 0
        self._posted = 0
        self._arrived = 0
        self._receives: list[Handle | None] = []
        self._sends: list[tuple[Message, Handle, Lease]] = []
        self._leases: dict[int, tuple[Room, Lease]] = {}

    def run(self) -> None:
        """Runs every task of the rank; results stand in the caller's tensors afterwards.

        Raises:
            RunError: this rank's task failed, or a peer failed, died or hung; names the rank, its
                task and the cause. The group is of no use afterwards.
        """
        session = self._session
        session.refuse_if_failed()
        with session.watch.calling(self._call):
            try:
                self._run()
            except RunError as error:
                session.fail(str(error))
                raise
            except BaseException as error:
                cause = session.watch.failed(error)
                session.fail(cause)
                if isinstance(error, Exception):
                    raise RunError(cause) from error
                raise
            finally:
                # Nothing is out unless the run failed; what peers may still write to is let go.
                for lease in [*(x[1] for x in self._leases.values()), *(x[2] for x in self._sends)]:
                    session.workspace.forget(lease)

    def _run(self) -> None:
        now, trace = self._session.watch.now, self._session.trace
        self._tag = self._session.tags(self._steps.tags, self._batch)
        for step in self._steps.steps:
            now.task = step.name
            self._post(step.task.index)
            if trace is not None:
                trace.append((str(self._steps.pass_), step.task.index))
            self._step(step)
        for index, number in self._steps.outputs:
            self._wait(index)
            self._pieces.own_place(number).copy_(self._pieces.get(number))
        for index in range(len(self._receives)):
            self._wait(index)
        self._free(self._steps.left)
        while self._sends:
            message, handle, lease = self._sends[-1]
            with self._talking(f"sending for {message.name}", message.peer):
                handle.wait(self._timeout_s)
            self._sends.pop()
            self._session.workspace.give_back(lease)

    def _step(self, step: Step) -> None:
        for index in step.waits:
            self._wait(index)
        for message in step.sends:
            self._send(message)
        for index in step.arrivals:
            self._wait(index)
        if step.writes:
            self._fill(step)
        self._free(step.frees)

    def _fill(self, step: Step) -> None:
        """Computes the values that a task writes on this rank."""
        for room in step.rooms:
            self._enter(room)
        task, pieces, values = step.task, self._pieces, self._values
        places = {number: pieces.get(number) for number in step.writes}
        if isinstance(task, Compute):
            self._tiles.run(self._steps.pass_, task, self._steps.program, pieces, places)
        elif isinstance(task, Merge) or (
            isinstance(task, Collective) and task.op is CollectiveOp.REDUCE_SCATTER
        ):
            merge(places, step.parts, values, pieces)
        elif isinstance(task, Local) and task.op is LocalOp.FILL:
            fill(places, values)
        elif isinstance(task, Local) and task.op is LocalOp.DELTA:
            delta(places, step.parts, values, pieces)
        else:
            join_parts(places, step.parts, values, pieces)

    # Messages

    def _post(self, task: int) -> None:
        """Posts every receive up to `task`, and some more ahead."""
        receives = self._steps.receives
        while self._posted < len(receives) and (
            receives[self._posted].task <= task or self._posted - self._arrived < AHEAD
        ):
            message = receives[self._posted]
            buffer = self._enter(message.room)
            handle = None
            if buffer.numel():
                with self._talking(message.name, message.peer):
                    tag = self._tag + message.task
                    handle = self._session.transport.receive(message.peer, buffer, tag)
            self._receives.append(handle)
            self._posted += 1

    def _wait(self, index: int) -> None:
        """Returns when a receive has arrived."""
        handle, message = self._receives[index], self._steps.receives[index]
        if handle is None:
            return
        with self._talking(message.name, message.peer):
            handle.wait(self._timeout_s)
        self._receives[index] = None
        self._arrived += 1

    def _send(self, message: Message) -> None:
        """Packs values side by side and starts to send them."""
        size = message.room.bytes * self._batch
        if not size:
            return
        lease = self._session.workspace.borrow(size)
        for number, source, buffer in zip(
            message.room.numbers, message.sources, self._cut(message.room, lease), strict=True
        ):
            place = self._pieces.view(number, buffer)
            held, wanted = self._values[source], self._values[number]
            place.copy_(part_of(self._pieces.get(source), held, wanted))
        with self._talking(message.name, message.peer):
            handle = self._session.transport.send(
                message.peer, lease.bytes, self._tag + message.task
            )
            self._sends.append((message, handle, lease))

    @contextlib.contextmanager
    def _talking(self, task: str, peer: int) -> Iterator[None]:
        """Turns what a transport raises into an error that names the culprit."""
        now = self._session.watch.now
        now.waits_for = peer
        try:
            yield
        except RuntimeError as error:
            raise self._session.watch.explain(task, peer, error) from error
        now.waits_for = -1

    # Rooms

    def _enter(self, room: Room) -> Array:
        """Borrows a room's buffer and lets its values stand in it."""
        lease = self._session.workspace.borrow(room.bytes * self._batch)
        self._leases[room.index] = room, lease
        for number, buffer in zip(room.numbers, self._cut(room, lease), strict=True):
            self._pieces.put(number, buffer)
        return lease.bytes

    def _cut(self, room: Room, lease: Lease) -> Iterator[Array]:
        for a, b in pairwise(room.edges):
            yield lease.bytes[a * self._batch : b * self._batch]

    def _free(self, rooms: tuple[int, ...]) -> None:
        """Gives rooms back: nothing on this rank reads them any more."""
        for index in rooms:
            room, lease = self._leases.pop(index)
            for number in room.numbers:
                self._pieces.drop(number)
            self._session.workspace.give_back(lease)
