"""Sharding and unsharding are exact inverses, for arrays and tensors, on any axis and length."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ultraattn as ua
from tests.plans.samples import small
from ultraattn.plans import Plan

LAYOUTS = ("contiguous", "zigzag", "striped", "remapped")
RULE = settings(deadline=None, derandomize=True, max_examples=40)


def plan_of(layout: str, length: int, ranks: int, kv_length: int | None = None) -> Plan:
    mask = ua.masks.strided() if kv_length is None else ua.masks.causal()
    return small(mask, seqlen=length, kv_seqlen=kv_length, ranks=ranks, layout=layout, heads=1)


def assert_inverse(plan: Plan, length: int, *, keys: bool = False) -> None:
    rows = np.arange(3 * length * 2).reshape(3, length, 2)
    parts = [plan.shard(rows, rank, dim=1, keys=keys) for rank in range(plan.ranks)]
    for rank, part in enumerate(parts):
        assert np.array_equal(part, rows[:, plan.positions(rank, keys=keys)])
    assert np.array_equal(plan.unshard(parts, dim=1, keys=keys), rows)
    tensor = torch.from_numpy(rows).transpose(1, 2)
    shards = [plan.shard(tensor, rank, dim=2, keys=keys) for rank in range(plan.ranks)]
    assert torch.equal(plan.unshard(shards, dim=2, keys=keys), tensor)
    assert torch.equal(plan.unshard(shards, dim=-1, keys=keys), tensor)


@RULE
@given(st.sampled_from(LAYOUTS), st.integers(0, 120), st.integers(1, 8))
def test_unshard_is_the_inverse_of_shard(layout: str, length: int, ranks: int) -> None:
    assert_inverse(plan_of(layout, length, ranks), length)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("length", "ranks"), [(7, 2), (57_826, 3), (57_826, 8), (1, 4)])
def test_lengths_that_do_not_divide(layout: str, length: int, ranks: int) -> None:
    assert_inverse(plan_of(layout, length, ranks), length)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_queries_and_keys_have_layouts_of_their_own(layout: str) -> None:
    plan = plan_of(layout, 10, 3, 29)
    assert_inverse(plan, 10)
    assert_inverse(plan, 29, keys=True)


def test_gradients_come_back_to_their_tokens() -> None:
    plan = plan_of("zigzag", 11, 3)
    x = torch.arange(11.0, requires_grad=True)
    weights = torch.arange(11.0) ** 2
    parts = [plan.shard(x, rank, dim=0) * plan.shard(weights, rank, dim=0) for rank in range(3)]
    plan.unshard(parts, dim=0).sum().backward()
    assert torch.equal(x.grad, weights)


def test_another_length_is_refused() -> None:
    plan = plan_of("contiguous", 7, 2)
    with pytest.raises(ua.InputError, match="has 8 entries, the plan's queries have 7 tokens"):
        plan.shard(np.zeros((1, 8)), 0)
    with pytest.raises(ua.InputError, match="1 parts for 2 ranks"):
        plan.unshard([np.zeros((1, 3))])
    with pytest.raises(ua.InputError, match="part 1 has 3 entries on axis 1, rank 1 owns 4"):
        plan.unshard([np.zeros((1, 3)), np.zeros((1, 3))])
    with pytest.raises(ua.InputError, match="rank 2: the plan has ranks 0 to 1"):
        plan.shard(np.zeros((1, 7)), 2)
    with pytest.raises(ua.InputError, match="rank -1"):
        plan.positions(-1)


def test_another_plan_may_take_the_layout() -> None:
    plan = plan_of("remapped", 50, 3)
    other = small(ua.masks.sliding_window(5), seqlen=50, heads=1, layout=plan.layout)
    for rank in range(3):
        assert np.array_equal(plan.positions(rank), other.positions(rank))
    with pytest.raises(ua.InputError, match="layout for 50 tokens over 3 ranks"):
        small(seqlen=51, layout=plan.layout)
