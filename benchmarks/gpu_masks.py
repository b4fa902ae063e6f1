"""Masks on the device for rivals and for checks, and attention in float64 by blocks of rows."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import gpu
from ultraattn.masks import Lengths, Mask

DIM = 128
CELLS = 16
"""Side of the padded table of a mask's cells, alike for all masks, so that Flex compiles once."""


@dataclasses.dataclass
class Seen:
    """A mask on the device: key intervals [low, high) of rows, and kinds of cells."""

    low: Tensor
    high: Tensor
    cell: Tensor
    table: Tensor

    def rule(self, q_at: Tensor | None = None, kv_at: Tensor | None = None) -> Callable[..., Any]:
        """A mask_mod over positions, or over places in a shard whose positions are given."""
        low, high, cell, table = self.low, self.high, self.cell, self.table

        def at_positions(b: Any, h: Any, q: Any, k: Any) -> Any:
            kind = table[cell[q], cell[k]]
            return (kind > 0) & ((kind < 2) | (k <= q)) & (k >= low[q]) & (k < high[q])

        def at_places(b: Any, h: Any, q: Any, k: Any) -> Any:
            assert q_at is not None
            assert kv_at is not None
            return at_positions(b, h, q_at[q], kv_at[k])

        return at_positions if q_at is None else at_places


def seen(mask: Mask, tokens: int) -> Seen:
    """A mask of square cells, or of one key interval a row, on the device."""
    rows = torch.arange(tokens)
    table = torch.zeros(CELLS, CELLS, dtype=torch.int8)
    kinds = mask.cell_table()
    if kinds is None:
        low, high = (
            torch.from_numpy(x[:, 0]) for x in mask.intervals(rows.numpy(), lengths(tokens))
        )
        cells, table[0, 0] = torch.zeros_like(rows), 1
    else:
        low, high = torch.zeros_like(rows), torch.full_like(rows, tokens)
        cells = rows * len(kinds) // tokens
        table[: len(kinds), : len(kinds)] = torch.from_numpy(kinds.astype("int8"))
    low, high, cells = (x.to(gpu.DEVICE, torch.int32) for x in (low, high, cells))
    return Seen(low, high, cells, table.to(gpu.DEVICE))


def lengths(tokens: int) -> Lengths:
    """As many keys as queries."""
    return Lengths(tokens, tokens)


def documents(tokens: int, seed: int = 0) -> list[int]:
    """Lengths drawn log-normal (median 665, long-tailed) that fill the sequence."""
    draw, found = random.Random(seed), list[int]()
    while sum(found) < tokens:
        length = max(16, int(draw.lognormvariate(6.5, 1.3)))
        found.append(min(tokens - sum(found), length))
    return found


def truth(mask: Seen, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    """Out and gradients of one head, (tokens, dim) each, in float64, by blocks of rows."""
    q, k, v, dout = (x[0, 0].double() for x in (q, k, v, dout))
    out, dq, dk, dv = (torch.zeros_like(x) for x in (q, q, k, v))
    every = torch.arange(len(k), device=k.device)
    rule = mask.rule()
    for start in range(0, len(q), 1024):
        rows = every[start : start + 1024]
        scores = (q[rows] @ k.T) * DIM**-0.5
        scores.masked_fill_(~rule(0, 0, rows[:, None], every[None]), float("-inf"))
        weights = scores.softmax(-1)
        out[rows] = weights @ v
        dv += weights.T @ dout[rows]
        slopes = dout[rows] @ v.T
        slopes -= (dout[rows] * out[rows]).sum(-1, keepdim=True)
        slopes *= weights
        slopes *= DIM**-0.5
        dq[rows] = slopes @ k
        dk += slopes.T @ q[rows]
    return out, dq, dk, dv
