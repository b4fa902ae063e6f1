"""Says what a launch costs on a GPU as rows of fused calls, and as one set of blocks.

Both are a start and work over a rate; the rate falls where there are fewer tiles of 128 rows than
multiprocessors. The constants come from measurements on an H200 (benchmarks/results:
gpu_kernels.json, gpu_sparse_kernel.json, gpu_sparse_1.json); only their ratios decide.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from ultraattn.chunks import Chunks
from ultraattn.masks.grid import OPEN_HI, BlockKind
from ultraattn.plans.passes import Pass
from ultraattn.plans.program import Block

FLOP_PER_PAIR = {Pass.FORWARD: 4.0, Pass.BACKWARD: 10.0}
"""Per unit of head_dim."""
ROWS_FLOPS = {Pass.FORWARD: 680e12, Pass.BACKWARD: 510e12}
BANDS_FLOPS = {Pass.FORWARD: 670e12, Pass.BACKWARD: 570e12}
"""Of cuDNN, and of FlashAttention-4 for bands that cuDNN does not take."""
ROWS_START_S = {Pass.FORWARD: 15e-6, Pass.BACKWARD: 60e-6}
"""Of each call; backward also makes the O that it asks for, and adds up results."""
SET_FLOPS = {Pass.FORWARD: 430e12, Pass.BACKWARD: 365e12}
SET_START_S = {Pass.FORWARD: 8e-6, Pass.BACKWARD: 25e-6}
BYTES_PER_S = {Pass.FORWARD: 3.5e12, Pass.BACKWARD: 2e12}
"""Of merges and copies; of sums of gradients, which change dtype."""
TILE = 128
PROCESSORS = 132


class Call(NamedTuple):
    """A block as a launch computes it."""

    rows: int
    cols: int
    heads: int
    pairs: int
    """Visible (query, key) pairs times heads."""
    full: bool
    place: int = 0
    """Where its keys begin among the rank's own; -1 for keys that were received."""
    cudnn: bool = True
    """Whether cuDNN takes it; else FlashAttention-4 does."""


def rows_serve(
    blocks: Sequence[Block],
    dim: int,
    dim_v: int,
    dtype: torch.dtype,
    q_chunks: Chunks,
    bands: bool,
) -> bool:
    """Whether fused kernels take every block: 16 bits, head_dim up to 128, full or causal.

    Any band where FlashAttention-4 is there for it (`bands`).
    """
    if dtype not in (torch.bfloat16, torch.float16) or max(dim, dim_v) > 128 or (dim | dim_v) % 8:
        return False
    return all(
        cudnn_takes(block, q_chunks) or (bands and block.kind is BlockKind.BAND) for block in blocks
    )


def cudnn_takes(block: Block, q_chunks: Chunks) -> bool:
    """Whether a block is full or causal."""
    causal = block.hi >= min(OPEN_HI, len(q_chunks[block.q_chunk]))
    return block.kind is BlockKind.FULL or (block.kind is BlockKind.BAND and causal)


def rows_seconds(pass_: Pass, rows: Iterable[Sequence[Call]], dim: int) -> float:
    """Of a launch as fused calls: FULL blocks of a row are one, others one each."""
    rows, total = list(rows), 0.0
    for row in rows:
        full = [call for call in row if call.full]
        calls = [[call] for call in row if not call.full] + ([full] if full else [])
        for some in calls:
            pairs = sum(call.pairs for call in some)
            rate = ROWS_FLOPS if some[0].cudnn else BANDS_FLOPS
            work = FLOP_PER_PAIR[pass_] * dim * pairs / rate[pass_]
            total += ROWS_START_S[pass_] + work / _filled([some])
        width = max(call.rows * call.heads for call in row) * dim * 2
        moved = width * (len(calls) + 1 if len(calls) > 1 else 2)
        keys = sum(call.cols * call.heads for call in row) * dim * 2
        if not _side_by_side(full):
            moved += 10 * keys  # joined, from and into strided tensors
        if pass_ is Pass.BACKWARD and len(rows) > 1:
            moved += 10 * keys  # dK and dV of a row, added to those of others in float32
        total += moved / BYTES_PER_S[pass_]
    return total


def set_seconds(pass_: Pass, rows: Iterable[Sequence[Call]], dim: int) -> float:
    """Of a launch as one set of blocks."""
    rows = list(rows)
    pairs = sum(call.pairs for row in rows for call in row)
    work = FLOP_PER_PAIR[pass_] * dim * pairs / SET_FLOPS[pass_]
    return SET_START_S[pass_] + work / _filled(rows)


def _side_by_side(calls: Sequence[Call]) -> bool:
    """Whether the keys of these calls follow each other in memory, and need no joining."""
    return all(a.place >= 0 and b.place == a.place + a.cols for a, b in pairwise(calls))


def _filled(rows: Iterable[Sequence[Call]]) -> float:
    """The share of multiprocessors that the tiles of these rows keep busy."""
    tiles = sum(max(-(-call.rows // TILE) * call.heads for call in row) for row in rows)
    return min(1.0, tiles / PROCESSORS)
