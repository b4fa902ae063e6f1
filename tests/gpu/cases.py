"""Inputs on the GPU, and the float64 truth of whole plans."""

import numpy as np
import torch

from ultraattn.masks import Lengths
from ultraattn.runtime.dense import dense_attention, dense_backward
from ultraattn.runtime.together import Together

DEVICE = "cuda"


def draw(seed, batch, heads, tokens, dim, dtype=torch.bfloat16):
    """(batch, heads, tokens, dim), (batch, tokens, heads, dim) in memory, as models keep it."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    shape = (batch, tokens, heads, dim)
    return torch.randn(shape, device=DEVICE, dtype=dtype, generator=generator).transpose(1, 2)


def error(got, expected):
    """Relative Frobenius error; NaN never passes a limit."""
    expected = expected.double()
    return float((got.double() - expected).norm() / expected.norm().clamp(min=1e-30))


def visible(mask, q_len, kv_len, heads=1):
    """The mask as a bool tensor (1 or heads, q_len, kv_len) on the GPU."""
    table = mask.dense(np.arange(q_len), np.arange(kv_len), Lengths(q_len, kv_len), heads=heads)
    return torch.from_numpy(np.array(table[0])).to(DEVICE)


def truth(q, k, v, dout, seen):
    """(out, dq, dk, dv) in float64."""
    return (dense_attention(q, k, v, seen)[0], *dense_backward(dout, q, k, v, seen))


def together(plan, q, k, v, dout, kernel="auto"):
    """(out, dq, dk, dv) of a plan, all ranks on this GPU; (0 x NaN shows unwritten rows)."""
    run = Together(plan, DEVICE, kernel=kernel)
    out, lse = run.forward(q, k, v)
    return (out, *run.backward(dout, q, k, v, out, lse))
