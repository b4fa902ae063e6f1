"""Bounds that hold for every plan over some layouts, however it splits heads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import causal, paper

import ultraattn as ua
from ultraattn import masks
from ultraattn.cluster import Cluster
from ultraattn.planning.least_time import least_seconds, traffic_bound
from ultraattn.planning.ledger import evaluate
from ultraattn.planning.passes import Where
from ultraattn.planning.setting import Shape, setting
from ultraattn.plans import Pass
from ultraattn.simulation.simulate import bound_s


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.integers(2, 4), st.integers(1, 3), st.booleans())
def test_no_assignment_of_any_head_ranges_moves_less(
    seed: int, ranks: int, heads: int, backward: bool
) -> None:
    """Sizes of `heads` ranges are an N-th each; random assignments under the cap that they keep."""
    rng = np.random.default_rng(seed)
    weight = rng.integers(0, 3, (4, 4)) * (rng.random((4, 4)) < 0.7)
    weight[0, 0] = 1
    whole = paper(weight * heads, ranks, 1, backward=backward)
    whole = replace(
        whole, **{n: getattr(whole, n) * heads for n in ("row_in", "row_out", "col_in", "col_out")}
    )
    one = paper(weight, ranks, 1, backward=backward)
    cut = replace(
        one,
        weight=np.repeat(one.weight, heads, axis=0),
        segments=tuple((g,) for g in range(heads)),
        **{
            n: np.repeat(getattr(one, n), heads, axis=0)
            for n in ("row_in", "row_out", "col_in", "col_out")
        },
    )
    for _ in range(5):
        chosen = rng.integers(0, ranks, len(cut.blocks))
        ledger = evaluate(cut, cut.spread(chosen))
        assert traffic_bound(replace(whole, cap=ledger.max_load)) <= ledger.total


def test_the_more_level_the_load_must_be_the_more_moves() -> None:
    bounds = [traffic_bound(paper(causal(8), 8, cap)) for cap in (8, 10, 16, 64)]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[0] > bounds[-1] > 0  # Blocks off the diagonal have a foreign row or column.


@pytest.mark.parametrize(("nodes", "each"), [(1, 8), (2, 4)])
def test_the_bound_lies_between_the_simple_one_and_every_plan(nodes: int, each: int) -> None:
    cluster = Cluster.load("h100").resize(nodes, each)
    shape = Shape(8192, 8192, 8, 8, 128, 128, "bfloat16", 1.0)
    for strategy in ("tile", "allgather", "heads"):
        plan = ua.plan(
            masks.full(), seqlen=8192, heads=8, head_dim=128, cluster=cluster, strategy=strategy,
            effort="fast",
        )  # fmt: skip
        made = setting(masks.full(), shape, plan.q_layout, plan.kv_layout)
        for pass_ in Pass:
            known = plan.pass_plan(pass_).predicted_s
            assert known is not None
            least = least_seconds(pass_, made, Where.of(cluster), known)
            simple = bound_s(str(pass_), plan.problem, nodes * each, cluster.known_costs)
            assert simple <= least <= known
            assert least_seconds(pass_, made, Where.of(cluster), known * 1.5) <= known
