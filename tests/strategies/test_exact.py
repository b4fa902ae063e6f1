"""Every rival, run on real processes: exact, with the traffic that its plan says."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.strategies.rival_plans import rival_plan
from tests.strategies.workers import attend
from ultraattn import masks
from ultraattn.masks import Lengths, Mask
from ultraattn.plans import Plan
from ultraattn.runtime.dense import dense_attention, dense_backward
from ultraattn.runtime.local import LocalRanks
from ultraattn.strategies import NAMES, by_name

HEADS, KV_HEADS, SEQLEN, DIM, VALUE_DIM = 4, 2, 37, 8, 6

MASKS: dict[str, Mask] = {
    "full": masks.full(),
    "causal": masks.causal(),
    "star": masks.star(),
    "window": masks.sliding_window(7),
    "document": masks.document([5, 20, 12]),
}
WIDE = [
    # All masks are covered below; these cover numbers of ranks.
    *((name, 1, 1) for name in ("ring", "allgather", "heads", "heads_ring", "mesh", "double_ring")),
    ("stripe", 1, 5),
    ("allgather", 1, 5),
    ("zigzag", 1, 8),
    ("heads_ring:4x2", 1, 8),
    ("heads_ring:2x4", 2, 4),
    ("mesh:2x4", 2, 4),
    ("double_ring", 2, 4),
]
CASES = [
    (name, mask, nodes, per_node)
    for mask in MASKS
    for name, nodes, per_node in [
        ("ring", 1, 4),
        ("ring", 1, 3),
        ("zigzag", 1, 4),
        ("stripe", 1, 4),
        ("allgather", 1, 4),
        ("allgather", 1, 2),
        ("heads", 1, 4),
        ("heads", 1, 3),
        ("heads_ring:2x2", 1, 4),
        ("heads_ring:4x1", 1, 4),
        ("heads_ring:1x2", 1, 2),
        ("mesh", 1, 4),
        ("mesh:1x3", 1, 3),
        ("double_ring", 2, 2),
        ("double_ring", 3, 1),
    ]
] + [(name, "causal", nodes, per_node) for name, nodes, per_node in WIDE]


@pytest.fixture(scope="module")
def groups() -> Iterator[dict[int, LocalRanks]]:
    made: dict[int, LocalRanks] = {}

    class Groups(dict[int, LocalRanks]):
        def __missing__(self, ranks: int) -> LocalRanks:
            made[ranks] = self[ranks] = LocalRanks(ranks, timeout_s=120)
            return made[ranks]

    yield Groups()
    for group in made.values():
        group.close()


@lru_cache
def tensors() -> dict[str, np.ndarray]:
    random = np.random.default_rng(5)
    shapes = {
        "q": (1, HEADS, SEQLEN, DIM),
        "k": (1, KV_HEADS, SEQLEN, DIM),
        "v": (1, KV_HEADS, SEQLEN, VALUE_DIM),
        "do": (1, HEADS, SEQLEN, VALUE_DIM),
    }
    return {name: random.standard_normal(shape) for name, shape in shapes.items()}


@lru_cache
def expected(mask: str, scale: float) -> dict[str, np.ndarray]:
    return dense(tensors(), mask, scale)


def dense(inputs: dict[str, np.ndarray], mask: str, scale: float) -> dict[str, np.ndarray]:
    tokens = np.arange(SEQLEN)
    truth = MASKS[mask].dense(tokens, tokens, Lengths(SEQLEN, SEQLEN), heads=HEADS)
    visible = torch.from_numpy(truth[0])
    q, k, v, do = (torch.from_numpy(inputs[name]) for name in ("q", "k", "v", "do"))
    out, _ = dense_attention(q, k, v, visible, scale)
    dq, dk, dv = dense_backward(do, q, k, v, visible, scale)
    return {"out": out.numpy(), "dq": dq.numpy(), "dk": dk.numpy(), "dv": dv.numpy()}


def error(found: np.ndarray, truth: np.ndarray) -> float:
    return float(np.linalg.norm(found - truth) / np.linalg.norm(truth))


def plan_of(
    name: str,
    mask: str,
    nodes: int,
    per_node: int,
    layout: str | None = None,
    dtype: str = "float64",
) -> Plan:
    return rival_plan(
        name,
        MASKS[mask],
        seqlen=SEQLEN,
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=DIM,
        value_dim=VALUE_DIM,
        nodes=nodes,
        per_node=per_node,
        layout=layout,
        dtype=dtype,
    )


@pytest.mark.parametrize(("name", "mask", "nodes", "per_node"), CASES)
def test_results_are_exact_and_traffic_is_the_plans(
    groups: dict[int, LocalRanks], name: str, mask: str, nodes: int, per_node: int
) -> None:
    check_run(groups, plan_of(name, mask, nodes, per_node), mask)


@settings(
    deadline=None,
    derandomize=True,
    max_examples=15,
    phases=[Phase.explicit, Phase.generate],
)
@given(
    name=st.sampled_from(sorted(NAMES)),
    mask=st.sampled_from(sorted(MASKS)),
    layout=st.sampled_from(["contiguous", "zigzag", "striped"]),
    data=st.data(),
)
def test_any_variant_over_any_layout_is_exact(
    groups: dict[int, LocalRanks], name: str, mask: str, layout: str, data: st.DataObject
) -> None:
    usual = plan_of(name, mask, 2, 2, layout)
    variants = by_name(name).variants(usual.problem, usual.ranks)
    chosen = data.draw(st.sampled_from(variants))
    check_run(groups, plan_of(chosen.label, mask, 2, 2, layout), mask)


def check_run(groups: dict[int, LocalRanks], plan: Plan, mask: str) -> None:
    plan.check()
    parts = groups[plan.ranks].run(attend, plan, tensors())
    truth = expected(mask, plan.problem.scale)
    for result in ("out", "dq", "dk", "dv"):
        keys = result in ("dk", "dv")
        whole = plan.unshard([part[result] for part in parts], dim=2, keys=keys)
        assert error(whole, truth[result]) < 1e-10, result
    sent = np.array([part["bytes_sent"] for part in parts])
    assert sent[:, 0].tolist() == plan.forward_account.sent.tolist()
    assert sent[:, 1].tolist() == plan.backward_account.sent.tolist()


@pytest.mark.parametrize(
    ("name", "nodes", "per_node"),
    [
        ("ring", 1, 4),
        ("double_ring", 2, 2),
        ("allgather", 1, 4),
        ("heads", 1, 4),
        ("heads_ring:2x2", 1, 4),
        ("mesh:2x2", 1, 4),
    ],
)
def test_16_bit_errors_are_at_most_twice_those_of_one_device(
    groups: dict[int, LocalRanks], name: str, nodes: int, per_node: int
) -> None:
    """Gradients travel rings in the accumulation dtype; nothing is rounded at every hop."""
    narrow = {key: x.astype(np.float16) for key, x in tensors().items()}
    truth = dense({key: x.astype(np.float64) for key, x in narrow.items()}, "causal", DIM**-0.5)
    errors = []
    for shape in ((name, nodes, per_node), ("ring", 1, 1)):
        plan = plan_of(shape[0], "causal", *shape[1:], dtype="float16")
        parts = groups[plan.ranks].run(attend, plan, narrow)
        errors.append(
            {
                key: error(plan.unshard([part[key] for part in parts], dim=2), value)
                for key, value in truth.items()
            }
        )
    several, one = errors
    ulp = float(np.finfo(np.float16).eps)
    for key in truth:
        assert several[key] <= 2 * one[key] + 4 * ulp, key
        assert several[key] > 0, key
