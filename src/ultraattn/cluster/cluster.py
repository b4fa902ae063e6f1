"""Describes where an attention runs: nodes, ranks in each, and what kernels and links cost there."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ultraattn.errors import InputError


@dataclass(frozen=True)
class Cluster:
    """Ranks on nodes. `align` is the token multiple at which chunks are cut (the kernels' tile)."""

    name: str
    nodes: int
    gpus_per_node: int
    align: int = 1

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.gpus_per_node < 1:
            raise InputError(
                f"cluster of {self.nodes} nodes with {self.gpus_per_node} ranks each: expected at "
                "least one of each"
            )

    @property
    def ranks(self) -> int:
        """Ranks in all."""
        return self.nodes * self.gpus_per_node

    def resize(self, nodes: int | None = None, gpus_per_node: int | None = None) -> Cluster:
        """The same kind of machine in another number."""
        return dataclasses.replace(
            self, nodes=nodes or self.nodes, gpus_per_node=gpus_per_node or self.gpus_per_node
        )

    @staticmethod
    def load(name: str) -> Cluster:
        """A preset by name.

        Raises:
            InputError: an unknown name; lists the presets.
        """
        if name not in PRESETS:
            raise InputError(f"cluster {name!r}: expected one of {', '.join(PRESETS)}")
        return PRESETS[name]


PRESETS = {
    "cpu": Cluster("cpu", 1, 1),
    "a800": Cluster("a800", 1, 8, align=128),
    "h100": Cluster("h100", 1, 8, align=128),
    "h800": Cluster("h800", 1, 8, align=128),
    "h200": Cluster("h200", 1, 8, align=128),
}
