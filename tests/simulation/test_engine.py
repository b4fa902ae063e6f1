"""The engine on jobs made by hand: order, shared NICs, slowed kernels, shared cores."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

from ultraattn.cluster import Cluster
from ultraattn.cluster.costs import Costs
from ultraattn.simulation.engine import Engine
from ultraattn.simulation.messages import Messages
from ultraattn.simulation.work import Jobs

PLAIN = dataclasses.replace(
    Cluster.load("h200").known_costs, compute_rate=(), nics_per_node=8, cores_per_node=0
)


def run(
    costs: Costs,
    nodes: Sequence[int],
    seconds: Sequence[float],
    rank: Sequence[int],
    pairs: Sequence[tuple[int, int]] = (),
    messages: Sequence[tuple[int, int, int]] = (),
    release: Sequence[float] | None = None,
    start_up: float = 0.0,
) -> tuple[list[float], list[float]]:
    """`messages` are (job, source, target); starts and stops."""
    task, source, target = (np.array([m[i] for m in messages], dtype=np.int64) for i in range(3))
    node = np.array(nodes)
    who = np.array(rank, dtype=np.int64)
    jobs = Jobs(
        tasks=len(seconds),
        seconds=np.array(seconds, dtype=np.float64),
        start_up_s=np.where(who < 0, start_up, 0.0),
        release_s=np.array(release if release is not None else [0.0] * len(seconds)),
        rank=who,
        before=np.array([a for a, _ in pairs], dtype=np.int64),
        after=np.array([b for _, b in pairs], dtype=np.int64),
        messages=Messages(
            task, source, target, np.ones_like(task), (node[source] != node[target]).astype(int)
        ),
    )
    start, stop = Engine(jobs, costs, nodes).run()
    return start.tolist(), stop.tolist()


def test_a_job_starts_when_all_before_it_have_stopped() -> None:
    start, stop = run(PLAIN, [0], [1, 2, 4], [0, 0, 0], [(0, 2), (1, 2)])
    assert start == [0, 0, 2]
    assert stop == [1, 2, 6]


def test_a_job_waits_for_its_launch() -> None:
    start, _ = run(PLAIN, [0], [1, 1], [0, 0], [(0, 1)], release=[0.5, 5.0])
    assert start == [0.5, 5.0]


class TestWorkedSchedule:
    """Q3 20, KV3 10, A0 10, A1 20, A2 10, O3 10; receives share a link, A0 A1 A2 a stream."""

    seconds = (20, 10, 10, 20, 10, 10)
    needs = ((1, 3), (0, 4), (1, 4), (4, 5))

    @pytest.mark.parametrize(
        ("receives", "kernels", "makespan"),
        [((1, 0), (2, 3, 4), 50), ((0, 1), (2, 4, 3), 60), ((0, 1), (2, 3, 4), 70)],
    )
    def test_order_decides(
        self, receives: tuple[int, ...], kernels: tuple[int, ...], makespan: int
    ) -> None:
        pairs = [*self.needs, *pairwise(receives)]
        pairs += pairwise(kernels)
        _, stop = run(PLAIN, [0], self.seconds, [0] * 6, pairs)
        assert max(stop) == makespan


class TestNics:
    one = dataclasses.replace(PLAIN, nics_per_node=1)
    two = dataclasses.replace(PLAIN, nics_per_node=2)
    nodes = (0, 0, 1, 1)

    def test_two_messages_share_one_nic(self) -> None:
        messages = [(0, 0, 2), (1, 1, 3)]
        _, stop = run(self.one, self.nodes, [3, 1], [-1, -1], (), messages)
        # Half speed until the short one is through at 2; 2 of the long one are left.
        assert stop == [4, 2]

    def test_a_nic_each_is_not_shared(self) -> None:
        _, stop = run(self.two, self.nodes, [3, 1], [-1, -1], (), [(0, 0, 2), (1, 1, 3)])
        assert stop == [3, 1]

    def test_opposite_directions_do_not_share(self) -> None:
        _, stop = run(self.one, self.nodes, [3, 1], [-1, -1], (), [(0, 0, 2), (1, 3, 1)])
        assert stop == [3, 1]

    def test_messages_inside_a_node_need_no_nic(self) -> None:
        _, stop = run(self.one, self.nodes, [3, 1], [-1, -1], (), [(0, 0, 1), (1, 1, 0)])
        assert stop == [3, 1]

    def test_the_start_up_is_not_shared(self) -> None:
        messages = [(0, 0, 2), (1, 1, 3)]
        _, stop = run(self.one, self.nodes, [2, 2], [-1, -1], (), messages, start_up=1.0)
        assert stop == [3, 3]


class TestInterference:
    """What h200 measured: 8192 tokens of attention beside 256 MB, by transport."""

    measured = Cluster.load("h200").known_costs

    @pytest.mark.parametrize(
        ("transport", "transfer_ms", "both_ms"),
        [("copy_engine", 0.723, 1.674), ("nccl", 0.955, 2.502)],
    )
    def test_measured_overlap_is_reproduced(
        self, transport: str, transfer_ms: float, both_ms: float
    ) -> None:
        link = dataclasses.replace(self.measured.inside, transport=transport)
        costs = dataclasses.replace(self.measured, inside=link)
        _, stop = run(costs, [0, 0], [1.638, transfer_ms], [0, -1], (), [(1, 1, 0)])
        assert stop[0] == pytest.approx(both_ms, rel=1e-3)
        assert stop[1] == pytest.approx(transfer_ms)

    def test_ranks_that_no_message_touches_are_not_slowed(self) -> None:
        costs = dataclasses.replace(PLAIN, compute_rate=((PLAIN.inside.transport, 0.5),))
        _, stop = run(costs, [0, 0, 0], [2, 2, 2], [0, -1, 2], (), [(1, 0, 1)])
        assert stop == [3, 2, 2]


class TestSharedCores:
    def test_two_ranks_on_one_core_take_turns_fairly(self) -> None:
        costs = dataclasses.replace(PLAIN, cores_per_node=1)
        _, stop = run(costs, [0, 0], [1, 2], [0, 1])
        assert stop == [2, 3]

    def test_nodes_do_not_share_cores(self) -> None:
        costs = dataclasses.replace(PLAIN, cores_per_node=1)
        _, stop = run(costs, [0, 1], [1, 2], [0, 1])
        assert stop == [1, 2]
