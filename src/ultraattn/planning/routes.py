"""Chooses the NICs over which pieces of chunks cross between nodes, so that all are used evenly.

A piece crosses between its owner's node and another node once, from a rank of one to a rank of the
other: its gateways. Inside the nodes it goes on over fast links.

    node 0 (owner a)                     node 1 (needs the chunk on e, f, g)

    a ────────────── NIC ──────────────> e ──> f, g     whole: the gateway is one that needs it
    a ──> b ──────── NIC ──────────────> f ──> e, g     large pieces are cut in rows, so that
    a ──────────────────────────────────>e ──> f, g     several pairs of NICs carry a stripe each

Results take the same ways backwards. Loads are counted in bytes, and a message counts `MESSAGE`
bytes more than it holds: what a link moves while a message starts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

MESSAGE = 1 << 19
"""Bytes that a NIC moves in the start-up of a message, about (h100: 18 us at 36 GB/s)."""
INSIDE = 3
"""A byte inside a node counts 2 ** -INSIDE of one that crosses between nodes."""


class Demand(NamedTuple):
    """A piece of a chunk that another node needs, or makes a partial result of."""

    owner: int
    """The rank that owns the chunk."""
    holders: tuple[int, ...]
    """Ranks of the owner's node that have it anyway, the owner among them."""
    users: tuple[int, ...]
    """Ranks of the other node that need it, or that have a part of it."""
    rows: int
    row_bytes: int

    @property
    def size(self) -> int:
        """Bytes."""
        return self.rows * self.row_bytes


class Way(NamedTuple):
    """The NICs of some rows of a demand."""

    row_start: int
    row_stop: int
    near: int
    """In the owner's node."""
    far: int
    """In the other node."""


@dataclass(frozen=True)
class Nodes:
    """Ranks by node."""

    node: tuple[int, ...]
    """Of each rank."""
    members: tuple[tuple[int, ...], ...]
    """Of each node."""
    place: tuple[int, ...]
    """Of each rank among the members of its node."""

    @staticmethod
    def of(node_of: Sequence[int]) -> Nodes:
        """From the node of each rank."""
        members: dict[int, list[int]] = defaultdict(list)
        for rank, node in enumerate(node_of):
            members[node].append(rank)
        count = max(node_of, default=-1) + 1
        place = [members[node].index(rank) for rank, node in enumerate(node_of)]
        rows = tuple(tuple(members[node]) for node in range(count))
        return Nodes(tuple(node_of), rows, tuple(place))

    def peer(self, rank: int, node: int) -> int:
        """The rank of another node in the same place, as far as there is one."""
        members = self.members[node]
        return members[self.place[rank] % len(members)]


def ways(demands: Sequence[Demand], nodes: Nodes, message: int = MESSAGE) -> list[list[Way]]:
    """The NICs of every demand, larger ones first onto those that are least busy.

    Pieces are cut in rows only where whole ones leave the busiest NIC more than a quarter above
    an even spread, and where that makes it less busy.

    Args:
        demands: in a fixed order, which decides between equals.
        nodes: ranks by node.
        message: bytes that a message counts more than it holds.

    Returns:
        For each demand its ways: disjoint rows, all of them together.
    """
    fair = _fair(demands, nodes)
    whole, busiest = _spread(demands, nodes, 0, message)
    if 4 * busiest <= 5 * fair:
        return whole
    striped, less_busy = _spread(demands, nodes, fair, message)
    return striped if less_busy < busiest else whole


def _spread(
    demands: Sequence[Demand], nodes: Nodes, fair: int, message: int
) -> tuple[list[list[Way]], int]:
    """Ways, cut in rows where `fair` is not 0, and the bytes of the busiest NIC."""
    busy: dict[tuple[int, bool], int] = defaultdict(int)
    opened: set[tuple[int, int]] = set()
    out: list[list[Way]] = [[] for _ in demands]
    for index in sorted(range(len(demands)), key=lambda i: (-demands[i].size, i)):
        demand = demands[index]
        count = _stripes(demand, fair, nodes, message) if fair else 1
        for start, stop in _cut(demand.rows, count):
            size = (stop - start) * demand.row_bytes
            pair = _pair(demand, size, count, busy, opened, nodes, message)
            out[index].append(Way(start, stop, *pair))
    return out, max(busy.values(), default=0)


def _fair(demands: Sequence[Demand], nodes: Nodes) -> int:
    """Bytes over each NIC of the busiest node, were they spread evenly."""
    total: dict[tuple[int, bool], int] = defaultdict(int)
    for demand in demands:
        total[nodes.node[demand.owner], False] += demand.size
        total[nodes.node[demand.users[0]], True] += demand.size
    return max((-(-size // len(nodes.members[n])) for (n, _), size in total.items()), default=0)


def _stripes(demand: Demand, fair: int, nodes: Nodes, message: int) -> int:
    """Stripes of a piece: none is more than a quarter of what a NIC carries in all."""
    least = max(2 * message, -(-fair // 4))
    most = min(len(nodes.members[nodes.node[r]]) for r in (demand.owner, demand.users[0]))
    return max(1, min(most, demand.rows, -(-demand.size // least)))


def _cut(rows: int, count: int) -> list[tuple[int, int]]:
    return list(pairwise(rows * i // count for i in range(count + 1)))


def _pair(
    demand: Demand,
    size: int,
    stripes: int,
    busy: dict[tuple[int, bool], int],
    opened: set[tuple[int, int]],
    nodes: Nodes,
    message: int,
) -> tuple[int, int]:
    """The two ranks whose NICs a stripe takes; both are marked busy with it."""
    home, away = nodes.node[demand.owner], nodes.node[demand.users[0]]
    if stripes > 1:
        pairs = dict.fromkeys((rank, nodes.peer(rank, away)) for rank in nodes.members[home])
    else:
        pairs = dict.fromkeys((nodes.peer(user, home), user) for user in demand.users)
        pairs |= dict.fromkeys((demand.owner, user) for user in demand.users)
        pairs[demand.owner, nodes.peer(demand.owner, away)] = None
    detour = (size >> INSIDE) + message // 2

    def cost(pair: tuple[int, int]) -> tuple[int, bool, bool, int, int]:
        near, far = pair
        more = size + (0 if pair in opened else message)
        extra = detour * ((near not in demand.holders) + (far not in demand.users))
        most = max(busy[near, False], busy[far, True])
        apart = nodes.place[near] != nodes.place[far]
        return most + more + extra, apart, near != demand.owner, near, far

    best = min(pairs, key=cost)
    more = size + (0 if best in opened else message)
    busy[best[0], False] += more
    busy[best[1], True] += more
    opened.add(best)
    return best
