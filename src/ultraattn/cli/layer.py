"""Turns the bytes of a text into queries, keys and values, in the shape of a Llama layer.

Bytes are embedded, normalised (RMSNorm), projected, and turned by their positions (rotary position
embedding), with seeded random weights. Each token is made from its position alone, so a rank makes
its own tokens, and one that stands at a wrong position shows in the result.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ultraattn.chunks import Ints
from ultraattn.plans.problem import Problem
from ultraattn.runtime.pieces import DTYPES

ROTARY_BASE = 10_000.0
NORM_EPSILON = 1e-6


@dataclass(frozen=True)
class Text:
    """What the layer reads: bytes, how many sequences of them, and the seed of its weights.

    Sequence b begins at byte ``b * length``; a text that is too short begins again.
    """

    data: bytes
    batch: int
    seed: int


@dataclass(frozen=True)
class Inputs:
    """Query, key, value and the gradient of the output, (batch, heads, tokens, dim) each."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


def inputs(problem: Problem, text: Text, q_positions: Ints, kv_positions: Ints) -> Inputs:
    """The tensors of some queries and some keys, in the problem's dtype.

    Where queries and keys differ in number, both end at the same token of the text.

    Args:
        problem: the shapes.
        text: what is read.
        q_positions: of the queries, (tokens,).
        kv_positions: of the keys, (tokens,).
    """
    p = problem
    length = max(p.q_len, p.kv_len)
    hidden = p.heads * p.head_dim
    random = torch.Generator().manual_seed(text.seed)
    embedding = _normal(random, 256, hidden)
    gain = 1 + 0.1 * _normal(random, hidden)
    shapes = ((p.heads, p.head_dim), (p.kv_heads, p.head_dim), (p.kv_heads, p.value_dim))
    weights = [_normal(random, hidden, h * d) * hidden**-0.5 for h, d in shapes]
    # The gradient of a whole sequence, of which these queries take their rows.
    dout = _normal(random, text.batch, p.heads, p.q_len, p.value_dim)
    at = torch.from_numpy(q_positions.copy()), torch.from_numpy(kv_positions.copy())
    places = (at[0] + (length - p.q_len), at[1] + (length - p.kv_len))
    states = [_normalised(embedding[_bytes(text, place, length)], gain) for place in places]
    q = _rotated(_heads(states[0] @ weights[0], p.heads), places[0])
    k = _rotated(_heads(states[1] @ weights[1], p.kv_heads), places[1])
    v = _heads(states[1] @ weights[2], p.kv_heads)
    dtype = DTYPES[p.dtype]
    return Inputs(*(x.to(dtype).contiguous() for x in (q, k, v, dout[:, :, at[0]])))


def _normal(random: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=random, dtype=torch.float64)


def _bytes(text: Text, places: Tensor, length: int) -> Tensor:
    """The byte values at some places of every sequence: int64, (batch, tokens)."""
    data = torch.frombuffer(bytearray(text.data), dtype=torch.uint8)
    starts = length * torch.arange(text.batch)[:, None]
    return data[(starts + places[None, :]) % len(text.data)].long()


def _normalised(states: Tensor, gain: Tensor) -> Tensor:
    """RMSNorm: x / sqrt(mean(x^2) + eps) * gain, over the last axis."""
    return states * (states.square().mean(dim=-1, keepdim=True) + NORM_EPSILON).rsqrt() * gain


def _heads(states: Tensor, heads: int) -> Tensor:
    """(batch, tokens, heads * dim) to (batch, heads, tokens, dim)."""
    batch, tokens, width = states.shape
    return states.view(batch, tokens, heads, width // heads).transpose(1, 2)


def _rotated(x: Tensor, places: Tensor) -> Tensor:
    """Rotary position embedding over pairs (i, i + dim // 2), as in Llama; an odd one stays."""
    half = x.shape[-1] // 2
    if not half:
        return x
    frequency = ROTARY_BASE ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = places.double()[:, None] * frequency
    cos, sin = angle.cos(), angle.sin()
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)
