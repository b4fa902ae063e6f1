"""Turns a program and costs into jobs: durations, streams, precedence, release times.

On clusters whose host computes (`Costs.host_serial`), packing a message keeps the host of its
sender busy before the message leaves: a job of its own on the sender's compute stream, numbered
past the tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ultraattn.chunks import Ints
from ultraattn.cluster.costs import Costs
from ultraattn.cluster.tables import Floats
from ultraattn.plans.account import value_bytes
from ultraattn.plans.layout import Layout
from ultraattn.plans.problem import Problem
from ultraattn.plans.program import STREAM_ORDER, Program, StreamKind
from ultraattn.simulation.durations import copy_seconds, kernel_seconds
from ultraattn.simulation.messages import (
    COLLECTIVE,
    TRANSFER,
    Messages,
    message_seconds,
    messages_of,
)

COMPUTE_STREAM = STREAM_ORDER.index(StreamKind.COMPUTE)


@dataclass(frozen=True)
class Jobs:
    """What the engine runs. Jobs 0 to tasks - 1 are the tasks; later ones pack messages."""

    tasks: int
    seconds: Floats
    """Alone: (jobs,)."""
    start_up_s: Floats
    """Of `seconds`, what a message does not share with others on its NIC: (jobs,)."""
    release_s: Floats
    """When the host has launched it: (jobs,)."""
    rank: Ints
    """Of the rank that computes it, or -1 for messages: (jobs,)."""
    before: Ints
    after: Ints
    """Job `before[i]` stops before `after[i]` starts."""
    messages: Messages


def jobs_of(
    pass_: str,
    problem: Problem,
    q_layout: Layout,
    kv_layout: Layout,
    nodes: Sequence[int],
    program: Program,
    costs: Costs,
    *,
    graph: bool,
    kernel: str | None,
) -> Jobs:
    """The jobs of one pass; see `ultraattn.simulation.simulate_pass` for the arguments."""
    tasks = len(program.tasks.rank)
    sizes = value_bytes(problem, program)
    messages = messages_of(program, sizes, nodes)
    sending, start_up = message_seconds(program, messages, costs, nodes)
    seconds = (
        kernel_seconds(pass_, problem, q_layout, kv_layout, program, costs, kernel)
        + copy_seconds(program, sizes, costs)
        + sending
    )
    moving = np.isin(program.tasks.kind, (TRANSFER, COLLECTIVE))
    rank = np.where(moving, -1, program.tasks.rank)
    deps, streams = program.tasks.depends_on, program.streams
    before = [deps.items]
    after = [np.repeat(np.arange(tasks), np.diff(deps.offsets))]
    link = program.streams.kind != COMPUTE_STREAM
    rows = np.repeat(np.arange(len(streams.rank)), np.diff(streams.tasks.offsets))
    items = streams.tasks.items
    if not costs.host_serial:
        follow = rows[1:] == rows[:-1]
        before.append(items[:-1][follow])
        after.append(items[1:][follow])
        release = _launched(program, messages, moving, costs) if not graph else np.zeros(tasks)
        return Jobs(
            tasks, seconds, start_up, release, rank,
            np.concatenate(before), np.concatenate(after), messages,
        )  # fmt: skip
    follow = (rows[1:] == rows[:-1]) & link[rows[1:]]
    before.append(items[:-1][follow])
    after.append(items[1:][follow])
    seconds = np.where(moving, seconds, seconds + costs.launch_s)
    packs = _packs(program, messages, costs)
    pack = tasks + np.arange(len(packs.task))
    own, moved = np.diff(deps.offsets), packs.task
    before.append(np.concatenate([deps.row(t) for t in moved.tolist()] or [[]]).astype(np.int64))
    after.append(np.repeat(pack, own[moved]))
    before.append(pack)
    after.append(moved)
    computing = np.flatnonzero(~moving)
    who = np.concatenate((program.tasks.rank[computing], packs.rank))
    number = np.concatenate((computing, moved))
    job = np.concatenate((computing, pack))
    order = np.lexsort((number, who))
    follow = who[order][1:] == who[order][:-1]
    before.append(job[order][:-1][follow])
    after.append(job[order][1:][follow])
    more = np.zeros(len(pack))
    return Jobs(
        tasks,
        np.concatenate((seconds, packs.seconds)),
        np.concatenate((start_up, more)),
        np.zeros(tasks + len(pack)),
        np.concatenate((rank, packs.rank)),
        np.concatenate(before),
        np.concatenate(after),
        messages,
    )


@dataclass(frozen=True)
class _Packs:
    task: Ints
    rank: Ints
    seconds: Floats


def _packs(program: Program, messages: Messages, costs: Costs) -> _Packs:
    """One for each sender of each message task: launch, and a copy of what is sent."""
    ranks = int(program.values.rank.max(initial=0)) + 1
    keys, inverse = np.unique(messages.task * ranks + messages.source, return_inverse=True)
    total = np.bincount(inverse, weights=messages.bytes, minlength=len(keys))
    launch = np.where(
        np.bincount(inverse, weights=messages.far, minlength=len(keys)) > 0,
        costs.between.launch_s,
        costs.inside.launch_s,
    )
    return _Packs(keys // ranks, keys % ranks, launch + 2 * total / costs.memory_bytes_per_s)


def _launched(
    program: Program, messages: Messages, moving: npt.NDArray[np.bool_], costs: Costs
) -> Floats:
    """When each task has been launched by the hosts of all its ranks, which run ahead."""
    tasks = len(program.tasks.rank)
    own = np.flatnonzero(~moving)
    far = np.tile(messages.far, 2)
    task = np.concatenate((own, messages.task, messages.task))
    rank = np.concatenate((program.tasks.rank[own], messages.source, messages.target))
    cost = np.concatenate(
        (
            np.full(len(own), costs.launch_s),
            np.where(far > 0, costs.between.launch_s, costs.inside.launch_s),
        )
    )
    keys, first = np.unique(rank * tasks + task, return_index=True) if tasks else (task, task)
    done = np.cumsum(cost[first])
    starts = np.flatnonzero(np.concatenate(([True], np.diff(keys // max(tasks, 1)) != 0)))
    base = np.zeros(len(keys))
    if len(keys):
        earlier = np.concatenate(([0.0], done))[starts]
        base = np.repeat(earlier, np.diff(np.concatenate((starts, [len(keys)]))))
    release = np.zeros(tasks)
    if len(keys):
        np.maximum.at(release, keys % tasks, done - base)
    return release
