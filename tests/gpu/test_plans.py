"""Whole plans with every rank on this GPU: each kernel, mask and head shape by the rule."""

import pytest
import torch

import ultraattn as ua
from tests.gpu.cases import draw, error, together, truth, visible
from ultraattn.cluster import Cluster
from ultraattn.runtime.kernels import fa4

TOKENS = 1100
MASKS = {
    "full": ua.masks.full(),
    "causal": ua.masks.causal(),
    "strided": ua.masks.strided(),
    "global_local": ua.masks.global_local(),
    "star": ua.masks.star(),
    "streaming": ua.masks.streaming(),
    "window": ua.masks.sliding_window(300),
    "document": ua.masks.document([137, 450, 89, 424]),
}
SHAPES = [(32, 32, 64), (32, 8, 128), (8, 1, 96)]
KERNELS = {
    "auto": MASKS,
    "sparse": MASKS,
    "flash2": ("full", "causal"),
    "cudnn": ("full", "causal"),
    "fa4": ("full", "causal"),
}


without_fa4 = pytest.mark.skipif(fa4.missing() is not None, reason=str(fa4.missing()))


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        pytest.param(k, n, marks=without_fa4 if k == fa4.name else ())
        for k, names in KERNELS.items()
        for n in names
    ],
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_plan_is_within_twice_the_error_of_one_device(name, kernel, shape):
    heads, kv_heads, dim = shape
    q, dout = draw(1, 1, heads, TOKENS, dim), draw(2, 1, heads, TOKENS, dim)
    k, v = draw(3, 1, kv_heads, TOKENS, dim), draw(4, 1, kv_heads, TOKENS, dim)
    true = truth(q, k, v, dout, visible(MASKS[name], TOKENS, TOKENS))

    def errors(ranks):
        plan = ua.plan(
            MASKS[name], seqlen=TOKENS, heads=heads, kv_heads=kv_heads, head_dim=dim,
            cluster=Cluster.load("h200").resize(gpus_per_node=ranks), effort="instant",
        )  # fmt: skip
        got = together(plan, q, k, v, dout, kernel)
        return [error(x, wanted) for x, wanted in zip(got, true, strict=True)]

    single = errors(1)
    # Tighter than the rule's four units in the last place: a half of one.
    slack = torch.finfo(torch.bfloat16).eps / 4
    for ranks in (2, 3, 4):
        for what, found, one in zip(("out", "dq", "dk", "dv"), errors(ranks), single, strict=True):
            assert found <= 2 * one + slack, (ranks, what, found, one)


def test_float32_plans_are_exact_to_float32():
    q, k, v, dout = (draw(i, 1, 4, 500, 64, torch.float32) for i in range(4))
    plan = ua.plan(
        ua.masks.causal(), seqlen=500, heads=4, head_dim=64, dtype="float32",
        cluster=Cluster.load("h200").resize(gpus_per_node=3), effort="instant",
    )  # fmt: skip
    true = truth(q, k, v, dout, visible(ua.masks.causal(), 500, 500))
    for got, wanted in zip(together(plan, q, k, v, dout), true, strict=True):
        assert error(got, wanted) < 5e-6
