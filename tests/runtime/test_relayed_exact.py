"""Plans over gateways, run on real processes: exact, with the traffic that the plan says."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.planning.relayed_plans import HOWS, LENGTH, MASKS, relayed_plan
from tests.strategies.workers import attend
from ultraattn.masks import Lengths
from ultraattn.runtime.dense import dense_attention, dense_backward

HEADS, KV_HEADS = 4, 2
CASES = [
    ("full", 2, 2, "zigzag", "rows", "waves"),
    ("causal", 2, 2, "zigzag", "heads", "grouped"),
    ("document", 2, 2, "contiguous", "any", "stripes"),
    ("window", 4, 1, "striped", "any", "parts"),
    ("global_local", 2, 2, "contiguous", "rows", "stripes"),
    ("star", 2, 2, "zigzag", "nodes", "together"),
    ("causal", 4, 1, "contiguous", "nodes", "together"),
    ("causal", 2, 4, "zigzag", "any", "stripes"),
]


def tensors(dtype):
    drawn = np.random.default_rng(7)
    shapes = {
        "q": (1, HEADS, LENGTH, 8),
        "k": (1, KV_HEADS, LENGTH, 8),
        "v": (1, KV_HEADS, LENGTH, 6),
        "do": (1, HEADS, LENGTH, 6),
    }
    return {name: drawn.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def errors(plan, mask, parts, inputs):
    tokens = np.arange(LENGTH)
    truth = MASKS[mask].dense(tokens, tokens, Lengths(LENGTH, LENGTH), heads=HEADS)
    visible, scale = torch.from_numpy(truth[0]), plan.problem.scale
    q, k, v, do = (torch.from_numpy(inputs[n].astype(np.float64)) for n in ("q", "k", "v", "do"))
    out, _ = dense_attention(q, k, v, visible, scale)
    dq, dk, dv = dense_backward(do, q, k, v, visible, scale)
    found = {}
    for name, true in (("out", out), ("dq", dq), ("dk", dk), ("dv", dv)):
        whole = plan.unshard([p[name] for p in parts], dim=2, keys=name in ("dk", "dv"))
        found[name] = np.linalg.norm(whole - true.numpy()) / np.linalg.norm(true.numpy())
    return found


@pytest.mark.parametrize(("mask", "nodes", "per_node", "layout", "assignment", "how"), CASES)
def test_results_are_exact_and_traffic_is_the_plans(
    local_ranks, mask, nodes, per_node, layout, assignment, how
):
    plan = relayed_plan(
        mask, nodes=nodes, per_node=per_node, layout=layout, assignment=assignment, how=HOWS[how]
    )
    plan.check()
    inputs = tensors(np.float64)
    parts = local_ranks(plan.ranks).run(attend, plan, inputs)
    for name, error in errors(plan, mask, parts, inputs).items():
        assert error < 1e-10, name
    sent = np.array([part["bytes_sent"] for part in parts])
    assert sent[:, 0].tolist() == plan.forward_account.sent.tolist()
    assert sent[:, 1].tolist() == plan.backward_account.sent.tolist()


@pytest.mark.parametrize("assignment", ["rows", "nodes"])
def test_16_bit_errors_are_at_most_twice_those_of_one_device(local_ranks, assignment):
    """Partial results are rounded once more where they cross, and never inside a node."""
    inputs = tensors(np.float16)
    found = []
    for shape in ((2, 2, HOWS["waves"]), (1, 1, None)):
        plan = relayed_plan(
            "causal", nodes=shape[0], per_node=shape[1], how=shape[2], dtype="float16",
            assignment=assignment if shape[2] else "rows", layout="contiguous",
        )  # fmt: skip
        parts = local_ranks(plan.ranks).run(attend, plan, inputs)
        found.append(errors(plan, "causal", parts, inputs))
    for name, error in found[0].items():
        assert error <= 2 * found[1][name] + 4 * float(np.finfo(np.float16).eps), name
