"""Whole plans in simulated time: streams, order, idle time, bounds, and what is refused."""

from __future__ import annotations

import dataclasses
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ultraattn as ua
from tests.strategies.rival_plans import rival_plan
from ultraattn import masks
from ultraattn.cluster import Cluster, Kernel, KernelTable, Link
from ultraattn.cluster.costs import Costs
from ultraattn.errors import InputError
from ultraattn.plans import Pass, Plan
from ultraattn.simulation import Idle, simulate
from ultraattn.strategies import NAMES

MASKS = (masks.causal(), masks.full(), masks.star(), masks.document([900, 100, 3096]))


@lru_cache
def plan_of(name: str, mask: int, nodes: int, per_node: int) -> Plan:
    return rival_plan(
        name,
        MASKS[mask],
        seqlen=4096,
        heads=8,
        kv_heads=2,
        head_dim=128,
        value_dim=128,
        dtype="bfloat16",
        nodes=nodes,
        per_node=per_node,
    )


@settings(deadline=None, derandomize=True, max_examples=40)
@given(
    name=st.sampled_from(sorted(NAMES)),
    mask=st.integers(0, len(MASKS) - 1),
    shape=st.sampled_from([(1, 4), (2, 2), (2, 4)]),
    preset=st.sampled_from(["a800", "h200", "cpu"]),
    graph=st.booleans(),
    pass_=st.sampled_from(list(Pass)),
)
def test_simulated_time_keeps_order_streams_and_bounds(
    name: str, mask: int, shape: tuple[int, int], preset: str, graph: bool, pass_: Pass
) -> None:
    plan = plan_of(name, mask, *shape)
    found = simulate(plan, Cluster.load(preset).resize(*shape), graph=graph).pass_(pass_)
    time, program = found.timeline, plan.pass_plan(pass_).program
    tiny = 1e-12
    start, stop = np.zeros((2, len(program.tasks.rank)))
    start[time.task], stop[time.task] = time.start_s, time.stop_s
    for task in program.task_views:
        for before in task.depends_on:
            assert stop[before] <= start[task.index] + tiny
    for key in {*zip(time.rank.tolist(), time.stream.tolist(), strict=True)}:
        on = (time.rank == key[0]) & (time.stream == key[1])
        assert (time.stop_s[on][:-1] <= time.start_s[on][1:] + tiny).all()
    total = found.busy_s + found.idle_s.sum(axis=0)
    assert total == pytest.approx(np.full(plan.ranks, found.makespan_s))
    assert (found.idle_s >= -tiny).all()
    assert found.bound_s <= found.makespan_s
    assert 0 < found.efficiency <= 1


def test_the_same_plan_gives_the_same_simulation() -> None:
    plan = plan_of("double_ring", 0, 2, 2)
    cluster = Cluster.load("h200").resize(2, 2)
    assert simulate(plan, cluster) == simulate(plan, cluster)


def toy_costs(**changes: object) -> Costs:
    """A kernel takes 1 s for each million pairs, a message 1 s for each million bytes."""
    tables = tuple(
        KernelTable(
            pass_,
            kind,
            tuple(
                (side, side, heads, 1e-9 + side * side * heads * 1e-6 * share)
                for side in (1, 512, 4096)
                for heads in (1, 64)
            ),
        )
        for pass_ in ("forward", "backward")
        for kind, share in (("full", 1.0), ("causal", 0.5))
    )
    link = Link("wire", 0.25, ((1000, 1e-3), (10**9, 1e3)))
    costs = Costs(
        head_dim=8,
        dtype="float64",
        dtype_factors=(),
        kernels=(Kernel("toy", False, 1.0, tables),),
        inside=link,
        between=link,
        nics_per_node=8,
        memory_bytes_per_s=1e15,
        local_start_s=0.0,
        launch_s=0.125,
        compute_rate=(),
        host_serial=False,
        cores_per_node=0,
        measured=True,
        notes=(),
    )
    return dataclasses.replace(costs, **changes)  # type: ignore[arg-type]


def toy(plan: Plan, **changes: object) -> Cluster:
    place = plan.place
    return Cluster("toy", place.nodes, place.gpus_per_node, costs=toy_costs(**changes))


class TestByHand:
    """Full mask, 2 ranks, 1024 tokens, 1 head: blocks of 512 x 512, 0.262144 s each."""

    plan = rival_plan("ring", masks.full(), seqlen=1024, heads=1, kv_heads=1, per_node=2)
    block_s = 512 * 512 * 1e-6
    message_s = 512 * 16 * 8 * 1e-6

    def test_a_transfer_hides_behind_the_first_block(self) -> None:
        found = simulate(self.plan, toy(self.plan)).forward
        assert found.makespan_s == pytest.approx(2 * self.block_s, rel=1e-4)
        assert found.efficiency == pytest.approx(1, rel=1e-3)

    def test_a_slow_link_leaves_the_ranks_waiting_for_transfers(self) -> None:
        slow = Link("wire", 0.0, ((1000, 1e-2), (10**9, 1e4)))
        found = simulate(self.plan, toy(self.plan, inside=slow)).forward
        assert 10 * self.message_s > self.block_s
        assert found.makespan_s == pytest.approx(10 * self.message_s + self.block_s, rel=1e-4)
        waited = found.idle(Idle.TRANSFER)
        assert waited == pytest.approx([10 * self.message_s - self.block_s] * 2, rel=1e-3)
        assert not found.idle(Idle.PEER).any()

    def test_host_launches_count_without_a_graph(self) -> None:
        found = simulate(self.plan, toy(self.plan), graph=False).forward
        # Send and receive are launched first (0.25 s each), then the first kernel (0.125 s).
        first = found.timeline.start_s[found.timeline.stream == 0].min()
        assert first == pytest.approx(0.625)

    def test_work_is_bound_by_the_peak(self) -> None:
        found = simulate(self.plan, toy(self.plan)).forward
        assert found.bound_s == pytest.approx(1024 * 1024 * 1e-6 / 2, rel=1e-4)


def test_short_passes_are_bound_by_a_message_and_a_launch() -> None:
    cluster = Cluster.load("h200").resize(1, 4)
    plan = ua.plan(
        masks.full(), seqlen=512, heads=1, head_dim=64, cluster=cluster, strategy="tile",
        effort="fast",
    )  # fmt: skip
    costs = cluster.known_costs
    for pass_ in Pass:
        assert plan.pass_plan(pass_).bounds.lower_bound > 0
        found = simulate(plan, cluster).pass_(pass_)
        launch = min(kernel.start_s(str(pass_)) for kernel in costs.kernels)
        message = min(link.start_s for link in (costs.inside, costs.between))
        assert found.bound_s == pytest.approx(launch + message)
        assert found.bound_s <= found.makespan_s


def test_waiting_for_a_peer_is_told_from_waiting_for_a_transfer() -> None:
    # Rank 1 computes nothing of its own: rank 0's partial result is what it waits for.
    mask = masks.from_blocks([[1, 0], [1, 0]])
    plan = rival_plan("mesh:1x2", mask, seqlen=1024, heads=1, kv_heads=1, per_node=2)
    found = simulate(plan, toy(plan)).forward
    waited = found.idle(Idle.PEER)[1], found.idle(Idle.TRANSFER)[1]
    out_s = 512 * 9 * 8 * 1e-6
    assert waited[1] == pytest.approx(out_s, rel=1e-3)
    assert waited[0] > 512 * 512 * 1e-6


def test_joined_blocks_are_one_launch() -> None:
    """A launch costs 1 s: a tile of 2 x 2 full blocks takes one, its causal end none."""
    plan = rival_plan(
        "allgather", masks.full(), seqlen=512, heads=1, kv_heads=1, per_node=1,
        layout="contiguous", chunks=4,
    )  # fmt: skip
    tables = tuple(
        KernelTable(p, k, ((64, 64, 1, 1.0), (4096, 4096, 1, 1.0 + 1e-9)))
        for p in ("forward", "backward") for k in ("full", "causal")
    )  # fmt: skip
    cluster = toy(plan, kernels=(Kernel("toy", False, 1.0, tables),))
    assert simulate(plan, cluster).forward.makespan_s == pytest.approx(1, rel=1e-3)
    causal = rival_plan(
        "allgather", masks.causal(), seqlen=512, heads=1, kv_heads=1, per_node=1,
        layout="contiguous", chunks=4,
    )  # fmt: skip
    # Four rows: each a full run (none for the first) with its causal end.
    assert simulate(causal, cluster).forward.makespan_s == pytest.approx(4, rel=1e-3)
    sets = toy(plan, kernels=(Kernel("toy", True, 1.0, tables),))
    assert simulate(causal, sets).forward.makespan_s == pytest.approx(1, rel=1e-3)


def test_a_serial_host_packs_messages_between_kernels() -> None:
    plan = TestByHand.plan
    found = simulate(plan, toy(plan, host_serial=True)).forward
    # One message packed (0.25 s), two launches (0.125 s each); the transfer still hides.
    expected = 2 * TestByHand.block_s + 0.25 + 0.25
    # A merge and its launch at the end.
    assert found.makespan_s == pytest.approx(expected + 0.125, rel=1e-3)


class TestRefusals:
    plan = plan_of("ring", 3, 2, 2)

    def test_a_smaller_cluster(self) -> None:
        with pytest.raises(InputError, match=r"2 nodes x 2 ranks on cluster 'h100' of 1 x 8"):
            simulate(self.plan, Cluster.load("h100"))

    def test_the_plan_names_its_cluster(self) -> None:
        assert simulate(self.plan).cluster == "cpu"
        place = dataclasses.replace(self.plan.place, cluster="nowhere")
        with pytest.raises(InputError, match="cluster 'nowhere': expected one of"):
            simulate(dataclasses.replace(self.plan, place=place))

    def test_costs_that_lack_a_kind(self) -> None:
        costs = Cluster.load("h200").known_costs
        only = dataclasses.replace(costs, kernels=costs.kernels[:1])
        cluster = dataclasses.replace(Cluster.load("h200").resize(2, 2), costs=only)
        with pytest.raises(
            InputError, match=r"partial blocks in the forward pass \(kernels: cudnn\)"
        ):
            simulate(self.plan, cluster)
        assert simulate(plan_of("ring", 0, 2, 2), cluster).makespan_s > 0

    def test_a_cluster_without_costs(self) -> None:
        with pytest.raises(InputError, match="has no costs"):
            simulate(self.plan, ua.Cluster("bare", 2, 2))
