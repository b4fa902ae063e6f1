"""Checks that tasks come in an order that every rank can follow, with inputs there in time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from ultraattn.plans.builder import stream_keys
from ultraattn.plans.check.facts import Facts
from ultraattn.plans.program import StreamKind, Transfer

SENDS = (StreamKind.SEND, StreamKind.SEND_BETWEEN_NODES)
RECEIVES = (StreamKind.RECEIVE, StreamKind.RECEIVE_BETWEEN_NODES)


def streams_hold_each_task(facts: Facts) -> None:
    """Each task stands, once, on every stream that it occupies."""
    found: dict[int, list[tuple[int, StreamKind]]] = defaultdict(list)
    named = set()
    for stream in facts.program.stream_views:
        if (stream.rank, stream.kind) in named:
            raise facts.fail("streams", f"rank {stream.rank} has two {stream.kind} streams")
        named.add((stream.rank, stream.kind))
        for index in stream.tasks:
            found[index].append((stream.rank, stream.kind))
    for task in facts.tasks:
        expected = stream_keys(
            task.kind,
            task.rank,
            [facts.values[v].rank for v in task.reads],
            [facts.values[v].rank for v in task.writes],
            facts.nodes,
        )
        have = sorted(found[task.index])
        if have != sorted(expected):
            raise facts.fail(
                "streams",
                f"{facts.name(task.index)} stands on streams {_named(have)}, expected "
                f"{_named(expected)}: both ends of a transfer must know of it, once",
            )


def _named(keys: Iterable[tuple[int, StreamKind]]) -> str:
    return ", ".join(f"{kind} of rank {rank}" for rank, kind in keys) or "none"


def same_order_on_both_ranks(facts: Facts) -> None:
    """What a rank sends another is received in the order of sending."""
    sent: dict[tuple[int, int], list[int]] = defaultdict(list)
    received: dict[tuple[int, int], list[int]] = defaultdict(list)
    for stream in facts.program.stream_views:
        for index in stream.tasks:
            task = facts.tasks[index]
            if not isinstance(task, Transfer):
                continue
            if stream.kind in RECEIVES:
                received[task.rank, stream.rank].append(index)
            elif stream.kind in SENDS:
                for target in {facts.values[v].rank for v in task.writes}:
                    sent[task.rank, target].append(index)
    for pair in sorted(sent.keys() | received.keys()):
        between = facts.nodes[pair[0]] != facts.nodes[pair[1]]
        if sent[pair] != received[pair]:
            raise facts.fail(
                "one order",
                f"rank {pair[0]} sends tasks {sent[pair]} to rank {pair[1]}"
                f"{' between nodes' if between else ''}, which receives {received[pair]}",
            )


def no_cycle(facts: Facts) -> None:
    """Dependencies and streams have no cycle, and follow the numbers of tasks."""
    count = len(facts.tasks)
    after: list[list[int]] = [[] for _ in range(count)]
    waiting = [0] * count
    pairs = [(dep, task.index) for task in facts.tasks for dep in task.depends_on]
    for stream in facts.program.stream_views:
        pairs += zip(stream.tasks[:-1], stream.tasks[1:], strict=True)
    for before, later in pairs:
        after[before].append(later)
        waiting[later] += 1
    ready = [task for task in range(count) if not waiting[task]]
    done = 0
    while ready:
        task = ready.pop()
        done += 1
        for later in after[task]:
            waiting[later] -= 1
            if not waiting[later]:
                ready.append(later)
    if done < count:
        cycle = _find_cycle(after, {task for task in range(count) if waiting[task]})
        raise facts.fail("no cycle", " waits for ".join(facts.name(t) for t in cycle))
    for before, later in pairs:
        if before >= later:
            raise facts.fail(
                "order of issue",
                f"{facts.name(later)} must follow {facts.name(before)} but is numbered before it",
            )


def _find_cycle(after: list[list[int]], stuck: set[int]) -> list[int]:
    """A cycle among `stuck`, read backwards: each waits for the next."""
    before: dict[int, int] = {}
    for task in sorted(stuck):
        for later in after[task]:
            if later in stuck:
                before.setdefault(later, task)
    task, path = min(stuck), []
    while task in before and task not in path:
        path.append(task)
        task = before[task]
    return [*path[path.index(task) :], task] if task in path else [*path, task]


def inputs_are_there(facts: Facts) -> None:
    """A task waits for the producers of all it reads."""
    producer = facts.program.producers
    for task in facts.tasks:
        deps = set(task.depends_on)
        for value in task.reads:
            if producer[value] >= 0 and producer[value] not in deps:
                raise facts.fail(
                    "inputs in time",
                    f"{facts.name(task.index)} reads {facts.values[value].place()} without "
                    f"waiting for {facts.name(producer[value])}",
                )


ORDER_RULES = (streams_hold_each_task, same_order_on_both_ranks, no_cycle, inputs_are_there)
