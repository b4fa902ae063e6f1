"""`plan_many`: one layout for several masks, and what each pays for it."""

from __future__ import annotations

from typing import Any

import pytest

import ultraattn as ua
from ultraattn import masks
from ultraattn.cluster import Cluster
from ultraattn.errors import InputError

SHAPE: dict[str, Any] = {
    "seqlen": 16384, "heads": 8, "kv_heads": 2, "head_dim": 128, "effort": "fast",
    "cluster": Cluster.load("h100").resize(1, 8),
}  # fmt: skip


def test_causal_and_window_share_a_layout_at_no_more_than_five_percent() -> None:
    both = ua.plan_many([masks.causal(), masks.sliding_window(1024)], **SHAPE)
    assert len({plan.q_layout for plan in both.plans}) == 1
    for share in both.shares:
        assert share.over_own <= 1.05
        assert share.predicted_s == pytest.approx(ua.simulate(share.plan).makespan_s, rel=1e-4)


def test_layers_count_in_what_is_chosen() -> None:
    order = [masks.causal(), masks.strided()]
    alone = [ua.plan(mask, strategy="tile", **SHAPE) for mask in order]
    assert alone[0].q_layout != alone[1].q_layout  # Else the counts could not matter.
    for index, counts in enumerate(([1000, 1], [1, 1000])):
        many = ua.plan_many(order, counts=counts, strategy="tile", **SHAPE)
        assert many.layout == alone[index].q_layout
        assert many.shares[index].over_own == 1
        assert "x its own best" in many.summary()


def test_bad_input_is_refused_with_what_to_do() -> None:
    with pytest.raises(InputError, match="at least one mask"):
        ua.plan_many([], **SHAPE)
    with pytest.raises(InputError, match="looks for the layout itself"):
        ua.plan_many([masks.causal()], layout="zigzag", **SHAPE)
    with pytest.raises(InputError, match="without costs"):
        ua.plan_many(
            [masks.causal()], seqlen=64, heads=1, head_dim=8, cluster=Cluster("bare", 1, 2),
            strategy="tile", effort="fast",
        )  # fmt: skip
