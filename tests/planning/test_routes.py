"""Pieces spread evenly over the NICs of both nodes."""

from __future__ import annotations

from ultraattn.planning.routes import Demand, Nodes, ways

NODES = Nodes.of([0, 0, 0, 0, 1, 1, 1, 1])
EVERYONE = (4, 5, 6, 7)


def busiest(demands, found):
    busy = {}
    for demand, each in zip(demands, found, strict=True):
        for way in each:
            size = (way.row_stop - way.row_start) * demand.row_bytes
            for end in ((way.near, "out"), (way.far, "in")):
                busy[end] = busy.get(end, 0) + size
    return max(busy.values())


def test_chunks_that_all_need_go_from_their_owners_to_the_same_places():
    demands = [Demand(owner, (0, 1, 2, 3), EVERYONE, 100, 10**6) for owner in range(4)]
    found = ways(demands, NODES)
    assert [[(w.near, w.far) for w in each] for each in found] == [[(r, r + 4)] for r in range(4)]


def test_heads_of_a_chunk_go_from_who_has_them_to_who_needs_them():
    demands = [Demand(0, (0, head), (4 + head,), 100, 10**6) for head in range(4)]
    assert [(w.near, w.far) for each in ways(demands, NODES) for w in each] == [
        (head, head + 4) for head in range(4)
    ]


def test_one_large_chunk_is_cut_over_all_nics():
    demands = [Demand(0, (0,), EVERYONE, 128, 10**6)]
    found = ways(demands, NODES)
    assert len(found[0]) == 4
    assert sum(w.row_stop - w.row_start for w in found[0]) == 128
    assert busiest(demands, found) == 32 * 10**6


def test_a_small_chunk_is_not_cut():
    assert len(ways([Demand(0, (0,), EVERYONE, 128, 100)], NODES)[0]) == 1


def test_a_chunk_of_one_user_may_leave_by_its_owner():
    way = ways([Demand(1, (1,), (6,), 10, 1000)], NODES)[0][0]
    assert (way.near, way.far) == (1, 6)
