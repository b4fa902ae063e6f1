"""Costs read off tables: exact at entries, sane between, bounded outside."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ultraattn.cluster import PRESETS, Cluster, KernelTable, Link
from ultraattn.errors import InputError

KERNELS = [
    (name, kernel.name, table)
    for name in PRESETS
    for kernel in Cluster.load(name).known_costs.kernels
    for table in kernel.tables
]


@pytest.mark.parametrize("table", [k[2] for k in KERNELS], ids=lambda t: f"{t.pass_}-{t.kind}")
def test_every_entry_is_given_back(table: KernelTable) -> None:
    for q, kv, heads, seconds in table.rows:
        assert table.seconds(q, kv, heads) == pytest.approx(seconds, rel=1e-9)


SIDES = st.integers(1, 1 << 20)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(index=st.integers(0, len(KERNELS) - 1), q=SIDES, kv=SIDES, heads=st.integers(1, 128))
def test_no_look_up_fails_or_beats_the_start_up_and_the_peak(
    index: int, q: int, kv: int, heads: int
) -> None:
    table = KERNELS[index][2]
    seconds = float(table.seconds(q, kv, heads))
    assert seconds >= table.start_s * (1 - 1e-9)
    assert np.isfinite(seconds)
    # Between entries two rates may mix; never by more than between neighbouring entries.
    assert seconds >= q * kv * heads / table.peak / 1.5


def test_between_entries_time_lies_between_them() -> None:
    table = KernelTable("forward", "full", ((64, 64, 1, 1e-5), (256, 256, 1, 1.6e-4)))
    # log-log: half way in the logarithm of the side is the geometric mean.
    assert table.seconds(128, 128, 1) == pytest.approx(4e-5)


def test_heads_are_linear_between_entries() -> None:
    table = KernelTable("forward", "full", ((64, 64, 1, 1e-5), (64, 64, 33, 9e-5)))
    assert table.seconds(64, 64, 17) == pytest.approx(5e-5)


def test_long_thin_shapes_grow_by_work_from_the_nearest_entry() -> None:
    rows = ((64, 64, 1, 1e-5), (64, 256, 1, 4e-5), (256, 64, 1, 4e-5), (256, 256, 1, 6e-5))
    table = KernelTable("forward", "full", rows)
    # The start-up is the least entry; what is past it scales.
    assert table.seconds(64, 2560, 1) == pytest.approx(1e-5 + 10 * 3e-5)


def test_tables_of_nothing_or_of_no_time_are_refused() -> None:
    with pytest.raises(InputError, match="no rows"):
        KernelTable("forward", "full", ())
    with pytest.raises(InputError, match="expected rows of q tokens"):
        KernelTable("forward", "full", ((64, 64, 1, 0.0),))
    with pytest.raises(InputError, match="link table of nccl"):
        Link("nccl", 0.0, ())


@pytest.mark.parametrize("name", PRESETS)
def test_links_start_up_then_bytes(name: str) -> None:
    costs = Cluster.load(name).known_costs
    for link in (costs.inside, costs.between):
        sizes = np.geomspace(1, 1e12, 200)
        seconds = link.seconds(sizes)
        assert (np.diff(seconds) >= 0).all()
        assert seconds[0] == pytest.approx(link.start_s)
        assert link.seconds(0) == 0
        extra = link.seconds(4e12) - link.seconds(2e12)
        assert extra == pytest.approx(2e12 / link.bytes_per_s)
        largest, measured = max(link.rows)
        assert link.seconds(largest) == pytest.approx(measured)


class TestPublishedNumbers:
    """Entries of the presets, so that a wrong column or unit cannot go unseen."""

    def test_h200_cudnn_runs_at_600_teraflops_forward_and_525_backward(self) -> None:
        costs = Cluster.load("h200").known_costs
        flops = 4 * 8192**2 * 32 * 128
        forward = costs.seconds(8192, 8192, 32, kernel="cudnn")
        assert flops / forward / 1e12 == pytest.approx(599, abs=1)
        backward = costs.seconds(8192, 8192, 32, pass_="backward", kernel="cudnn")
        assert 2.5 * flops / backward / 1e12 == pytest.approx(525, abs=1)

    def test_a_small_causal_block_costs_as_much_as_a_full_one(self) -> None:
        costs = Cluster.load("a800").known_costs
        assert costs.seconds(256, 256, 1, "causal") == pytest.approx(
            costs.seconds(256, 256, 1), rel=0.05
        )
        assert costs.seconds(65536, 65536, 32, "causal") == pytest.approx(
            0.49 * costs.seconds(65536, 65536, 32), rel=0.02
        )

    def test_one_head_of_h200_agrees_with_measured_launches_a_block(self) -> None:
        # One cuDNN launch for each 4096 x 4096 block of one head: 160 TFLOP/s over all.
        costs = Cluster.load("h200").known_costs
        seconds = costs.seconds(4096, 4096, 1, kernel="cudnn")
        assert 4 * 4096**2 * 128 / seconds / 1e12 == pytest.approx(160, rel=0.15)

    def test_links_between_nodes_are_about_a_seventh_on_a800(self) -> None:
        costs = Cluster.load("a800").known_costs
        ratio = costs.inside.bytes_per_s / costs.between.bytes_per_s
        assert ratio == pytest.approx(7.0, abs=0.2)
