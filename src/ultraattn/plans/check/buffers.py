"""Checks that no value is used after its buffer is given away."""

from __future__ import annotations

import itertools
from collections import defaultdict

from ultraattn.plans.check.facts import Facts
from ultraattn.plans.check.regions import area, region_of


def buffers_not_shared_in_time(facts: Facts) -> None:
    """A value fits its buffer, and nothing uses it once the buffer is given away."""
    producer, widths = facts.program.producers, facts.problem.widths
    sizes = facts.program.buffers.bytes.tolist()
    ranks = facts.program.buffers.rank.tolist()
    users: dict[int, list[int]] = defaultdict(list)
    for index, value in enumerate(facts.values):
        if value.buffer < 0:
            continue
        size = area(region_of(value)) * widths.row_bytes(value.tensor, value.wide)
        if size > sizes[value.buffer] or ranks[value.buffer] != value.rank or producer[index] < 0:
            raise facts.fail(
                "buffers",
                f"{value.place()} needs {size} bytes; buffer {value.buffer} has "
                f"{sizes[value.buffer]} on rank {ranks[value.buffer]}",
            )
        users[value.buffer].append(index)
    shared = {buffer: values for buffer, values in users.items() if len(values) > 1}
    if not shared:
        return
    readers: dict[int, list[int]] = defaultdict(list)
    for task in facts.tasks:
        for number in task.reads:
            readers[number].append(task.index)
    reach = _Reach(facts)
    for buffer, values in shared.items():
        ordered = sorted(values, key=lambda v: producer[v])
        for earlier, later in itertools.pairwise(ordered):
            for user in sorted({producer[earlier], *readers[earlier]}):
                if not reach.before(user, producer[later]):
                    raise facts.fail(
                        "buffers",
                        f"{facts.name(producer[later])} reuses buffer {buffer} while "
                        f"{facts.name(user)} may still use {facts.values[earlier].place()}",
                    )


class _Reach:
    """Answers "does a finish before b starts?" along dependencies and streams."""

    def __init__(self, facts: Facts) -> None:
        self._before: list[list[int]] = [list(task.depends_on) for task in facts.tasks]
        for stream in facts.program.stream_views:
            for earlier, later in zip(stream.tasks[:-1], stream.tasks[1:], strict=True):
                self._before[later].append(earlier)

    def before(self, a: int, b: int) -> bool:
        """Walks back from b, never past a: numbers only fall along the way."""
        stack, seen = [b], {b}
        while stack:
            for task in self._before[stack.pop()]:
                if task == a:
                    return True
                if task > a and task not in seen:
                    seen.add(task)
                    stack.append(task)
        return False


BUFFER_RULES = (buffers_not_shared_in_time,)
