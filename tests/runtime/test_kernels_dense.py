from __future__ import annotations

import pytest
import torch

from ultraattn.errors import InputError
from ultraattn.runtime import dense
from ultraattn.runtime.dense import dense_attention, dense_backward

F64 = torch.float64


def inputs(rows=11, keys=9, heads=4, kv_heads=2, dim=6, dim_v=5):
    gen = torch.Generator().manual_seed(0)
    shapes = [(heads, rows, dim), (kv_heads, keys, dim), (kv_heads, keys, dim_v)]
    shapes.append((heads, rows, dim_v))
    return [torch.randn(2, *shape, generator=gen, dtype=F64) for shape in shapes]


def autograd(q, k, v, dout, mask, scale):
    """The same by PyTorch's own attention and autograd."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(
        *leaves, attn_mask=mask, scale=scale, enable_gqa=True
    )
    return out.detach(), torch.autograd.grad(out, leaves, dout)


@pytest.mark.parametrize("score_bytes", [64 << 20, 8 * 2 * 4 * 9 * 3, 1])
@pytest.mark.parametrize("mask_heads", [None, 1, 4])
def test_dense_attention_is_pytorchs_whatever_the_row_blocks(score_bytes, mask_heads, monkeypatch):
    monkeypatch.setattr(dense, "SCORE_BYTES", score_bytes)
    q, k, v, dout = inputs()
    mask = None
    if mask_heads:
        mask = torch.rand(mask_heads, 11, 9, generator=torch.Generator().manual_seed(1)) < 0.5
        mask[..., 0] = True
    out, grads = autograd(q, k, v, dout, mask, 0.7)
    torch.testing.assert_close(dense_attention(q, k, v, mask, 0.7)[0], out, rtol=1e-12, atol=1e-13)
    for got, want in zip(dense_backward(dout, q, k, v, mask, 0.7), grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


def test_a_function_of_rows_is_the_mask_it_gives(monkeypatch):
    monkeypatch.setattr(dense, "SCORE_BYTES", 8 * 2 * 4 * 9 * 3)
    q, k, v, dout = inputs()
    mask = torch.arange(11)[:, None] >= torch.arange(9)

    def causal(rows):
        return rows[:, None] >= torch.arange(9)

    for got, want in zip(
        (*dense_attention(q, k, v, causal), *dense_backward(dout, q, k, v, causal)),
        (*dense_attention(q, k, v, mask), *dense_backward(dout, q, k, v, mask)),
        strict=True,
    ):
        assert torch.equal(got, want)


def test_rows_that_see_nothing_are_zero_with_an_lse_of_minus_infinity():
    q, k, v, dout = inputs()
    mask = torch.ones(11, 9, dtype=torch.bool)
    mask[4] = False
    out, lse = dense_attention(q, k, v, mask)
    grads = dense_backward(dout, q, k, v, mask)
    assert (out[:, :, 4] == 0).all()
    assert (lse[:, :, 4] == float("-inf")).all()
    assert (grads[0][:, :, 4] == 0).all()
    assert all(g.isfinite().all() for g in grads)
    assert lse[:, :, :4].isfinite().all()


@pytest.mark.parametrize(("rows", "keys"), [(0, 9), (5, 0), (0, 0)])
def test_no_queries_or_no_keys_are_fine(rows, keys):
    q, k, v, dout = inputs(rows, keys)
    out, lse = dense_attention(q, k, v)
    assert out.shape == (2, 4, rows, 5)
    assert (out == 0).all()
    assert (lse == float("-inf")).all()
    dq, dk, dv = dense_backward(dout, q, k, v)
    assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, v.shape)
    assert all((g == 0).all() for g in (dq, dk, dv))


def test_a_nan_in_the_inputs_is_not_hidden():
    q, k, v, _ = inputs()
    q[0, 0, 0, 0] = float("nan")
    assert dense_attention(q, k, v)[0][0, 0, 0].isnan().all()


def test_shapes_that_do_not_fit_are_refused():
    q, k, v, _ = inputs(heads=4, kv_heads=3)
    with pytest.raises(InputError, match="multiple of kv_heads"):
        dense_attention(q, k, v)
