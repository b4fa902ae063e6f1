"""The simulation against two H200s: ring-flash-attn 0.1.8 over FlashAttention-2 and NCCL."""

from __future__ import annotations

import dataclasses

import pytest

from tests.strategies.rival_plans import rival_plan
from ultraattn import masks
from ultraattn.cluster import Cluster, Link
from ultraattn.simulation import simulate

# Megabytes and 1e9 bytes a second, both directions busy; about 60 us of host time a call.
NCCL = ((0.0625, 0.8), (1, 9.5), (4, 27.0), (16, 82.3), (64, 256.0), (256, 302.8))

MEASURED_MS = [
    # strategy, mask, tokens, kv heads, forward, forward and backward
    ("ring", "causal", 8192, 32, 1.699, 6.541),
    ("zigzag", "causal", 8192, 32, 1.418, 5.219),
    ("stripe", "causal", 8192, 32, 1.5, 5.351),
    ("ring", "causal", 32768, 32, 20.231, 77.058),
    ("zigzag", "causal", 32768, 32, 13.811, 52.721),
    ("stripe", "causal", 32768, 32, 14.355, 54.111),
    ("ring", "causal", 32768, 8, 20.356, 74.747),
    ("zigzag", "causal", 32768, 8, 14.04, 51.195),
    ("stripe", "causal", 32768, 8, 14.331, 51.678),
    ("ring", "full", 32768, 32, 26.875, 101.06),
    ("ring", "full", 131072, 8, 406.048, 1512.379),
]


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    rows = tuple((int(mb * 2**20), mb * 2**20 / rate / 1e9) for mb, rate in NCCL)
    pair = Cluster.load("h200").resize(1, 2)
    costs = dataclasses.replace(pair.known_costs, inside=Link("nccl", 60e-6, rows))
    return dataclasses.replace(pair, costs=costs)


@pytest.mark.parametrize(
    ("name", "mask", "tokens", "kv_heads", "forward_ms", "both_ms"), MEASURED_MS
)
def test_rings_take_what_was_measured(
    cluster: Cluster,
    name: str,
    mask: str,
    tokens: int,
    kv_heads: int,
    forward_ms: float,
    both_ms: float,
) -> None:
    plan = rival_plan(
        name,
        masks.causal() if mask == "causal" else masks.full(),
        seqlen=tokens,
        heads=32,
        kv_heads=kv_heads,
        head_dim=128,
        value_dim=128,
        dtype="bfloat16",
        per_node=2,
    )
    found = simulate(plan, cluster, graph=False, kernel="fa2")
    assert found.forward.makespan_s * 1e3 == pytest.approx(forward_ms, rel=0.12)
    assert found.makespan_s * 1e3 == pytest.approx(both_ms, rel=0.12)
