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
from ultraattn.plans.passes import Pass
from ultraattn.plans.program import Collective, CollectiveOp, Compute, Local, LocalOp, Merge
from ultraattn.runtime.copies import copy
from ultraattn.runtime.pieces import Between, Own, Pieces, part_of
from ultraattn.runtime.reduce import delta, fill, join_parts, merge
from ultraattn.runtime.session import Session
from ultraattn.runtime.steps import Message, Room, Step, Steps
from ultraattn.runtime.tiles import Tiles
from ultraattn.runtime.transports import Handle
from ultraattn.runtime.workspace import Lease

AHEAD = 32
"""Receives that are posted before they are needed: enough to keep links busy, not all memory."""
BESIDE = 8
"""Rooms that may wait for work on side streams before the calling stream waits for it."""


class Execution:
    """One call of one pass on one rank.

    Args:
        session: the group's transport, workspace and watch.
        steps: what this rank does.
        layouts: of queries and of keys.
        own: the caller's tensors, inputs and results, (batch, heads, local tokens, width), and
            what is kept from forward to backward, where anything is.
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
        own: Own,
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
        self._kept = own.get(Between.KEPT)
        if self._kept is not None and steps.pass_ is Pass.BACKWARD:
            for number, tensor in steps.kept.views(self._kept, batch):
                self._pieces.stand(number, tensor)
        self._tag = 0
        self._posted = 0
        self._arrived = 0
        self._receives: list[Handle | None] = []
        self._sends: list[tuple[Message, Handle, Lease | None]] = []
        self._leases: dict[int, tuple[Room, Lease | None]] = {}
        self._room_of: dict[int, int] = {}
        self._readers: dict[int, Handle] = {}
        """What reads a room on a side stream."""
        self._late: list[tuple[Handle, int]] = []
        """Rooms to give back, once what reads them on a side stream is done."""
        self._last: list[int] = []
        """Rooms to give back at the end: a peer decides when what reads them is done."""
        self._merges: list[Handle] = []

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
                    if lease is not None:
                        session.workspace.forget(lease)

    def _run(self) -> None:
        now, trace = self._session.watch.now, self._session.trace
        self._tag = self._session.tags(self._steps.tags, self._batch)
        for step in self._steps.steps:
            now.task = step.name
            if not step.final:
                self._post(step.task.index)
            if trace is not None:
                trace.append((str(self._steps.pass_), step.task.index))
            self._step(step)
        for index, number in self._steps.outputs:
            self._wait(index)
            self._pieces.own_place(number).copy_(self._pieces.get(number))
        for index in range(len(self._steps.receives)):
            self._wait(index)
        self._free(self._steps.left)
        for handle in self._merges:
            handle.wait(self._timeout_s)
        while self._sends:
            message, handle, lease = self._sends[-1]
            with self._talking(f"sending for {message.name}", message.peer):
                handle.wait(self._timeout_s)
            self._sends.pop()
            if lease is not None:
                self._session.workspace.give_back(lease)
        for room in [*(room for _, room in self._late), *self._last]:
            self._give_back(room)
        self._session.transport.finish()

    def _step(self, step: Step) -> None:
        if step.final and self._session.asides:
            self._beside(step)
            return
        for index in step.waits:
            self._wait(index)
        for message in step.sends:
            self._send(message)
        for index in step.arrivals:
            self._wait(index)
        if step.writes:
            self._fill(step)
            self._keep(step.writes)
        self._free(step.frees)

    def _beside(self, step: Step) -> None:
        """A final merge on a side stream, beside the launches that come; one for those that wait.

        Nothing on this rank reads its result before the call ends.
        """
        for index in step.waits:
            self._post_until(index)
        aside = self._session.asides[bool(step.waits)]
        with aside.forked():
            for index in step.waits:
                self._wait(index)
            self._fill(step)
        handle = aside.handle()
        self._merges.append(handle)
        if step.waits:
            self._last += step.frees
            return
        self._readers |= {self._room_of[n]: handle for n in step.reads if n in self._room_of}
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
            self._post_next()

    def _post_until(self, index: int) -> None:
        while self._posted <= index:
            self._post_next()

    def _post_next(self) -> None:
        """Posts the next receive: where it has a place, or into a buffer."""
        message = self._steps.receives[self._posted]
        transport, size = self._session.transport, message.room.bytes * self._batch
        handle = None
        with self._talking(message.name, message.peer):
            accepted = transport.accept(message.peer, size) if size else None
            if accepted is not None:
                place, handle = accepted
                self._enter(message.room, place)
            else:
                buffer = self._enter(message.room)
                if size:
                    tag = self._tag + message.task
                    handle = transport.receive(message.peer, buffer, tag)
        self._receives.append(handle)
        self._posted += 1

    def _wait(self, index: int) -> None:
        """Returns when a receive has arrived."""
        self._post_until(index)
        handle, message = self._receives[index], self._steps.receives[index]
        if handle is None:
            return
        with self._talking(message.name, message.peer):
            handle.wait(self._timeout_s)
        self._receives[index] = None
        self._arrived += 1
        self._keep(message.room.numbers)

    def _keep(self, numbers: tuple[int, ...]) -> None:
        """Copies what backward reads again of values that are there now."""
        if self._kept is not None and self._steps.pass_ is Pass.FORWARD:
            self._steps.kept.fill(self._kept, numbers, self._pieces)

    def _send(self, message: Message) -> None:
        """Starts to send values side by side: each to its place at the peer, or packed."""
        size = message.room.bytes * self._batch
        if not size:
            return
        transport = self._session.transport
        with self._talking(message.name, message.peer):
            handle = transport.put(message.peer, size, lambda place: self._pack(message, place))
        if handle is not None:
            self._sends.append((message, handle, None))
            rooms = [self._room_of[n] for n in message.sources if n in self._room_of]
            self._readers |= dict.fromkeys(rooms, handle)
            return
        lease = self._session.workspace.borrow(size)
        self._pack(message, lease.bytes)
        with self._talking(message.name, message.peer):
            handle = transport.send(message.peer, lease.bytes, self._tag + message.task)
            self._sends.append((message, handle, lease))

    def _pack(self, message: Message, buffer: Array) -> None:
        """Copies the values of a message side by side into `buffer`."""
        for number, source, part in zip(
            message.room.numbers, message.sources, self._cut(message.room, buffer), strict=True
        ):
            held, wanted = self._values[source], self._values[number]
            place = self._pieces.view(number, part)
            copy(place, part_of(self._pieces.get(source), held, wanted))

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

    def _enter(self, room: Room, place: Array | None = None) -> Array:
        """Lets a room's values stand in `place`, or in a buffer that it borrows."""
        lease = None
        if place is None:
            lease = self._session.workspace.borrow(room.bytes * self._batch)
            place = lease.bytes
        self._leases[room.index] = room, lease
        for number, buffer in zip(room.numbers, self._cut(room, place), strict=True):
            self._pieces.put(number, buffer)
            self._room_of[number] = room.index
        return place

    def _cut(self, room: Room, buffer: Array) -> Iterator[Array]:
        for a, b in pairwise(room.edges):
            yield buffer[a * self._batch : b * self._batch]

    def _free(self, rooms: tuple[int, ...]) -> None:
        """Gives rooms back: nothing that is still to be issued on this rank reads them."""
        for index in rooms:
            reader = self._readers.pop(index, None)
            if reader is None:
                self._give_back(index)
            else:
                self._late.append((reader, index))
        while len(self._late) > BESIDE:
            reader, index = self._late.pop(0)
            reader.wait(self._timeout_s)
            self._give_back(index)

    def _give_back(self, index: int) -> None:
        room, lease = self._leases.pop(index)
        for number in room.numbers:
            self._pieces.drop(number)
        if lease is not None:
            self._session.workspace.give_back(lease)
