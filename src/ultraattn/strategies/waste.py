"""Counts, from a program alone, how many received chunks of keys no launch ever reads."""

from __future__ import annotations

from dataclasses import dataclass

from ultraattn.plans.program import Collective, Compute, Program, Transfer


@dataclass(frozen=True)
class Receives:
    """Receives of key/value chunks: (chunk, rank) pairs."""

    total: int
    useless: int
    """Of `total`: the rank never computes with the chunk."""


def key_receives(program: Program) -> Receives:
    """How many times a rank received a chunk of keys, and how often in vain."""
    values = program.value_views
    received: set[tuple[int, int]] = set()
    used: set[tuple[int, int]] = set()
    for task in program.task_views:
        if isinstance(task, (Transfer, Collective)):
            received |= {
                (values[v].chunk, values[v].rank) for v in task.writes if values[v].tensor == "k"
            }
        elif isinstance(task, Compute):
            used |= {(values[v].chunk, task.rank) for v in task.reads if values[v].tensor == "k"}
    return Receives(len(received), len(received - used))
