"""Puts values that go the same way at the same time into one message, or into one collective."""

from __future__ import annotations

from dataclasses import dataclass, field

from ultraattn.planning.routes import Nodes
from ultraattn.plans.builder import Key, ProgramBuilder
from ultraattn.plans.program import CollectiveOp

Waiting = dict[tuple[Key, int, int], tuple[dict[int, None], list[int]]]
"""Values read and values written, by key of issue, source and target."""


@dataclass
class Mail:
    """Messages that are being put together: values by key of issue, source and target."""

    builder: ProgramBuilder
    nodes: Nodes
    waiting: Waiting = field(default_factory=dict)

    def send(self, key: Key, source: int, target: int, read: int, written: int) -> None:
        """One value more for the message of `key` between two ranks."""
        reads, writes = self.waiting.setdefault((key, source, target), ({}, []))
        reads[read] = None
        writes.append(written)

    def post(self, grouped: bool, together: bool) -> None:
        """Adds all messages: each by itself, or those of one key as a collective.

        Args:
            grouped: collectives inside each node.
            together: collectives between all nodes.
        """
        node = self.nodes.node
        for joined, inside in ((grouped, True), (together, False)):
            chosen = {k: m for k, m in self.waiting.items() if (node[k[1]] == node[k[2]]) is inside}
            if joined:
                self._as_collectives(chosen)
            else:
                self._as_transfers(chosen)
        self.waiting.clear()

    def _as_transfers(self, chosen: Waiting) -> None:
        for (key, source, target), (reads, writes) in chosen.items():
            nodes = self.nodes
            order = (nodes.place[target] - nodes.place[source]) % len(
                nodes.members[nodes.node[source]]
            )
            self.builder.transfer(source, reads, writes, (*key, order, source))

    def _as_collectives(self, chosen: Waiting) -> None:
        groups: dict[tuple[Key, int], tuple[dict[int, None], list[int]]] = {}
        node = self.nodes.node
        for (key, source, target), (reads, writes) in chosen.items():
            where = node[source] if node[source] == node[target] else -1
            all_reads, all_writes = groups.setdefault((key, where), ({}, []))
            all_reads.update(reads)
            all_writes += writes
        values = self.builder.values
        for (key, where), (reads, writes) in groups.items():
            # The first that holds a piece sends it: those that hold least come first.
            order = sorted(reads, key=lambda n: (values[n].rows * values[n].heads, n))
            self.builder.collective(CollectiveOp.ALL_TO_ALL, order, writes, (*key, where))
