"""A cluster by name: a preset at the ranks that are asked for."""

from __future__ import annotations

import pytest

import ultraattn as ua
from ultraattn.cluster import Cluster
from ultraattn.errors import InputError

SHAPE = {"seqlen": 512, "heads": 4, "head_dim": 64, "strategy": "rows"}


def test_a_preset_by_name_is_that_cluster():
    mask = ua.masks.causal()
    named = ua.plan(mask, cluster="h200", ranks=4, **SHAPE)
    assert named == ua.plan(mask, cluster=Cluster.load("h200").resize(1, 4), **SHAPE)
    assert ua.plan(mask, cluster="h100", ranks=16, **SHAPE).ranks == 16


@pytest.mark.parametrize(
    ("cluster", "ranks", "said"),
    [("h200", 12, "12 ranks on cluster h200"), ("abacus", 4, "'abacus'")],
)
def test_what_is_not_there_is_refused(cluster, ranks, said):
    with pytest.raises(InputError, match=said):
        ua.plan(ua.masks.causal(), cluster=cluster, ranks=ranks, **SHAPE)
