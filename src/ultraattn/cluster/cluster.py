"""Describes where an attention runs: nodes, ranks of each, what kernels and links cost there."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ultraattn.cluster.costs import HOW_TO_MEASURE, Costs
from ultraattn.cluster.storage import (
    SCHEMA,
    Reader,
    costs_from_json,
    costs_to_json,
    read_json,
    write_json,
)
from ultraattn.errors import InputError

PRESETS = ("cpu", "a800", "h100", "h800", "h200")
"""Clusters that come with the package."""


@dataclass(frozen=True)
class Cluster:
    """Ranks on nodes. `align` is the token multiple at which chunks are cut (the kernels' tile).

    Rank r stands on node ``r // gpus_per_node``. Without `costs` it can be planned for as far as
    bytes and pairs decide, but not simulated.
    """

    name: str
    nodes: int
    gpus_per_node: int
    align: int = 1
    costs: Costs | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.gpus_per_node < 1:
            raise InputError(
                f"cluster of {self.nodes} nodes with {self.gpus_per_node} ranks each: expected at "
                "least one of each"
            )
        if self.align < 1:
            raise InputError(f"cluster align {self.align}: expected at least 1 token")

    @property
    def ranks(self) -> int:
        """Ranks in all."""
        return self.nodes * self.gpus_per_node

    @property
    def known_costs(self) -> Costs:
        """Its costs.

        Raises:
            InputError: it has none.
        """
        if self.costs is None:
            raise InputError(f"cluster {self.name!r} has no costs; {HOW_TO_MEASURE}")
        return self.costs

    def resize(self, nodes: int | None = None, gpus_per_node: int | None = None) -> Cluster:
        """The same kind of machine in another number."""
        return dataclasses.replace(
            self,
            nodes=self.nodes if nodes is None else nodes,
            gpus_per_node=self.gpus_per_node if gpus_per_node is None else gpus_per_node,
        )

    def with_ranks(self, ranks: int) -> Cluster:
        """As many ranks: on one node where they fit on it, else on whole nodes.

        Raises:
            InputError: more ranks than a node has, and no multiple of them.
        """
        node = self.gpus_per_node
        if node == 1 or ranks <= node:
            return self.resize(nodes=1, gpus_per_node=ranks)
        if ranks % node:
            raise InputError(
                f"{ranks} ranks on cluster {self.name}, whose nodes have {node} ranks: expected at "
                f"most {node} or a multiple of it; or say how many nodes and ranks of each "
                "(--nodes and --gpus-per-node, Cluster.resize)"
            )
        return self.resize(nodes=ranks // node)

    def save(self, path: str | Path) -> None:
        """Writes one JSON file that `load` reads."""
        data: dict[str, Any] = {
            "schema": SCHEMA,
            "name": self.name,
            "nodes": self.nodes,
            "gpus_per_node": self.gpus_per_node,
            "align": self.align,
            "costs": None if self.costs is None else costs_to_json(self.costs),
        }
        write_json(Path(path), data)

    @staticmethod
    def load(name: str | Path) -> Cluster:
        """A preset by name, or a file that `save` or `ultraattn profile` wrote.

        Raises:
            InputError: neither a preset (lists them) nor a file; or a file with a missing,
                unknown or mistyped entry (names it).
        """
        if isinstance(name, str) and name in PRESETS:
            return _preset(name)
        path = Path(name)
        if not path.is_file():
            raise InputError(
                f"cluster {str(name)!r}: expected one of {', '.join(PRESETS)}, or the path of a "
                "cluster file"
            )
        return _read(path)


@lru_cache
def _preset(name: str) -> Cluster:
    return _read(Path(__file__).parent / "presets" / f"{name}.json")


def _read(path: Path) -> Cluster:
    reader = Reader(read_json(path), str(path))
    schema = reader.take("schema", int)
    if schema != SCHEMA:
        raise InputError(
            f"{path}: schema {schema}, this version reads {SCHEMA}; write it again with "
            "`ultraattn profile`"
        )
    costs: Costs | None = None
    if reader.has("costs"):
        costs = costs_from_json(reader.take("costs", dict), f"{path}, costs")
    cluster = Cluster(
        name=reader.take("name", str),
        nodes=reader.number("nodes", 1, int),
        gpus_per_node=reader.number("gpus_per_node", 1, int),
        align=reader.number("align", 1, int),
        costs=costs,
    )
    reader.done()
    return cluster
