from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ultraattn.errors import InputError
from ultraattn.runtime.dense import dense_attention
from ultraattn.runtime.merge import accumulate_dtype, merge_partials, sum_partials

INF = float("inf")


def parts_of(keys: int, cuts: list[int], seed: int = 0, spread: float = 1.0):
    """Dense partials over key ranges of one random problem, and the whole."""
    gen = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, 3, n, 8, generator=gen, dtype=torch.float64) for n in (5, keys, keys))
    edges = [0, *sorted(cuts), keys]
    spans = [slice(a, b) for a, b in pairwise(edges)]
    parts = [dense_attention(q, k[:, :, s], v[:, :, s], None, spread) for s in spans]
    return [p[0] for p in parts], [p[1] for p in parts], dense_attention(q, k, v, None, spread)


@settings(deadline=None, derandomize=True, max_examples=25)
@given(
    cuts=st.lists(st.integers(0, 40), max_size=6),
    order=st.randoms(use_true_random=False),
    spread=st.sampled_from([0.01, 1.0, 300.0]),
)
def test_merging_any_cut_in_any_order_gives_the_whole(cuts, order, spread):
    outs, lses, (out, lse) = parts_of(40, cuts, spread=spread)
    index = list(range(len(outs)))
    order.shuffle(index)
    got, got_lse = merge_partials([outs[i] for i in index], [lses[i] for i in index])
    torch.testing.assert_close(got, out, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(got_lse, lse, rtol=1e-13, atol=1e-13)


def test_merging_in_groups_is_merging_at_once():
    outs, lses, _ = parts_of(40, [3, 11, 30])
    left = merge_partials(outs[:2], lses[:2])
    right = merge_partials(outs[2:], lses[2:])
    both = merge_partials([left[0], right[0]], [left[1], right[1]])
    for got, want in zip(both, merge_partials(outs, lses), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_identity_changes_no_bit(dtype):
    out = torch.randn(1, 2, 7, 4).to(dtype)
    lse = torch.randn(1, 2, 7, dtype=accumulate_dtype(dtype)) * 50
    zero, nothing = torch.zeros_like(out), torch.full_like(lse, -INF)
    for outs, lses in (([out], [lse]), ([zero, out, zero], [nothing, lse, nothing])):
        got, got_lse = merge_partials(outs, lses)
        assert torch.equal(got, out)
        assert got.dtype == dtype
        assert torch.equal(got_lse, lse)


def test_garbage_in_rows_that_saw_nothing_does_not_leak():
    outs, lses, (out, lse) = parts_of(40, [])
    for garbage in (float("nan"), INF, -INF):
        got, got_lse = merge_partials(
            [torch.full_like(out, garbage), outs[0]], [torch.full_like(lse, -INF), lses[0]]
        )
        assert torch.equal(got, out)
        assert torch.equal(got_lse, lse)
        dead, dead_lse = merge_partials(
            [torch.full_like(out, garbage)] * 2, [torch.full_like(lse, -INF)] * 2
        )
        assert torch.equal(dead, torch.zeros_like(out))
        assert torch.equal(dead_lse, torch.full_like(lse, -INF))


def test_nan_in_rows_that_saw_something_stays_visible():
    out, lse = torch.full((1, 1, 1, 2), float("nan")), torch.zeros(1, 1, 1)
    assert merge_partials([out, out], [lse, lse])[0].isnan().all()
    assert merge_partials([out * 0, out * 0], [lse * float("nan"), lse])[1].isnan().all()


@pytest.mark.parametrize("level", [-1e30, -1e4, 1e4, 1e30])
def test_large_logits_neither_overflow_nor_vanish(level):
    one, two = torch.full((1, 1, 1, 2), 1.0), torch.full((1, 1, 1, 2), 3.0)
    lse = torch.full((1, 1, 1), level)
    out, whole = merge_partials([one, two], [lse, lse])
    assert torch.equal(out, torch.full_like(out, 2.0))
    torch.testing.assert_close(whole, lse + torch.log(torch.tensor(2.0)))


@pytest.mark.parametrize(("dtype", "ulps"), [(torch.bfloat16, 1), (torch.float32, 4)])
def test_error_does_not_grow_with_the_number_of_parts(dtype, ulps):
    worst = []
    for count in (2, 8, 64):
        outs, lses, (out, _) = parts_of(128, list(range(128 // count, 128, 128 // count)))
        rounded = [x.to(dtype) for x in outs]
        got, _ = merge_partials(rounded, [x.to(torch.float32) for x in lses], torch.float64)
        worst.append(((got - out).norm() / out.norm()).item())
    assert max(worst) <= ulps * torch.finfo(dtype).eps
    assert worst[-1] <= 3 * worst[0]


def test_the_result_is_cast_once():
    outs, lses, _ = parts_of(40, [7, 20])
    wide, _ = merge_partials(outs, lses, torch.float64)
    narrow, _ = merge_partials(outs, lses, torch.bfloat16)
    assert torch.equal(narrow, wide.to(torch.bfloat16))


def test_strided_parts_and_destinations_work_in_place():
    outs, lses, (out, lse) = parts_of(40, [9])
    outs = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in outs]
    outs[0] = outs[0].mT.contiguous().mT
    space = torch.full((2, 6, 3, 8), 7.0, dtype=torch.float64)
    lse_space = torch.full((2, 3, 9), 7.0, dtype=torch.float64)
    target, lse_target = space[:, 1:].transpose(1, 2), lse_space[:, :, 2:7]
    got, got_lse = merge_partials(outs, lses, out=target, lse_out=lse_target)
    assert got.data_ptr() == target.data_ptr()
    assert got_lse.data_ptr() == lse_target.data_ptr()
    torch.testing.assert_close(space[:, 1:].transpose(1, 2), out, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(lse_space[:, :, 2:7], lse, rtol=1e-13, atol=1e-13)
    assert (space[:, :1] == 7).all()
    assert (lse_space[:, :, :2] == 7).all()


def test_a_destination_may_be_one_of_the_parts():
    outs, lses, (out, lse) = parts_of(40, [9])
    merge_partials(outs, lses, out=outs[0], lse_out=lses[0])
    torch.testing.assert_close(outs[0], out, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(lses[0], lse, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (1, 0, 3, 4), (1, 2, 0, 4), (1, 2, 3, 0)])
def test_empty_shapes_merge(shape):
    out, lse = merge_partials([torch.zeros(shape)] * 2, [torch.zeros(shape[:3])] * 2)
    assert out.shape == shape
    assert lse.shape == shape[:3]


def test_parts_that_do_not_fit_are_refused():
    out, lse = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3)
    with pytest.raises(InputError, match="0 partial outputs"):
        merge_partials([], [])
    with pytest.raises(InputError, match="2 partial outputs and 1"):
        merge_partials([out, out], [lse])
    with pytest.raises(InputError, match="partial result 1"):
        merge_partials([out, out], [lse, lse[:, :, :2]])
    with pytest.raises(InputError, match="destination of shape"):
        merge_partials([out], [lse], out=out[:, :1])
    with pytest.raises(InputError, match="no parts"):
        sum_partials([])
    with pytest.raises(InputError, match="cannot be added"):
        sum_partials([out, out[:, :1]])


def test_sums_of_16_bit_gradients_are_rounded_once():
    gen = torch.Generator().manual_seed(1)
    parts = [torch.randn(1, 2, 9, 4, generator=gen).bfloat16() for _ in range(64)]
    exact = torch.stack([p.double() for p in parts]).sum(dim=0)
    got = sum_partials(parts)
    assert got.dtype == torch.bfloat16
    assert ((got.double() - exact).norm() / exact.norm()).item() <= 2.0**-9


def test_a_sum_leaves_its_parts_alone_and_is_no_alias_of_one():
    part = torch.ones(2, 3)
    assert sum_partials([part]).data_ptr() != part.data_ptr()
    target = torch.zeros(3, 4)[:, ::2].T
    assert sum_partials([part, part], out=target) is target
    assert (target == 2).all()
    assert (part == 1).all()
