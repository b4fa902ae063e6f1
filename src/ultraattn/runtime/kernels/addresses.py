"""Turns tensors into tables of addresses that kernels read: many chunks in one launch.

Numbers reach a table as arguments of a kernel that writes them, so that a graph can capture it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ultraattn.plans.head_ranges import HeadRange
from ultraattn.runtime.kernels import sparse_triton as device_code
from ultraattn.runtime.kernels.block_set import BlockSet, Place

WRITES = (32, 128, 448)
"""Numbers that one launch writes: few sizes, since each is compiled, and at most 4 KiB."""


def line(x: Tensor, base: Tensor, heads: HeadRange, b: int, unit: int = 1) -> tuple[int, int, int]:
    """Where head 0 of batch entry b begins, from `base`, and the strides by head and row.

    In units of `unit` elements.
    """
    head, row = x.stride(1), x.stride(2)
    distance = (x.data_ptr() - base.data_ptr()) // x.element_size()
    start = distance + b * x.stride(0) - heads[0] * head
    return start // unit, head // unit, row // unit


def key_lines(
    blocks: BlockSet,
    ks: Sequence[Tensor],
    vs: Sequence[Tensor],
    k0: Tensor,
    v0: Tensor,
    batch: Sequence[int],
    unit: int,
) -> list[int]:
    """A line for K and one for V of every key chunk, batch entry by batch entry."""
    return [
        number
        for b in batch
        for k, v, chunk in zip(ks, vs, blocks.keys, strict=True)
        for number in (
            *line(k, k0, chunk.heads, b, unit),
            *line(v, v0, chunk.heads, b, unit),
        )
    ]


def tables(device: torch.device, *parts: Sequence[int]) -> list[Tensor]:
    """Tables of numbers on the device, written by kernels, so that a graph can capture them."""
    numbers: list[int] = []
    starts = []
    for part in parts:
        starts.append(len(numbers))
        numbers += [*part, *[0] * (len(part) % 2)]  # each begins at 16 bytes
    numbers += [0, 0]
    whole = torch.empty(len(numbers) + WRITES[-1], dtype=torch.int64, device=device)
    at = 0
    while at < len(numbers):
        count = next((n for n in WRITES if n >= len(numbers) - at), WRITES[-1])
        some = numbers[at : at + count]
        sent = tuple(2 * x + 1 + device_code.BIAS for x in (*some, *[0] * (count - len(some))))
        device_code.write[(1,)](whole[at:], sent, count, num_warps=1)
        at += count
    return [whole[start:] for start in starts]


def writable(places: Sequence[Place]) -> tuple[list[Place], list[tuple[Tensor, Tensor]]]:
    """Places whose tensors a kernel can write: of one dtype, last stride 1; what to copy after."""
    found, late = [], []
    places = [p for p in places if p.tensors[0].numel()]
    for place in places:
        tensors = []
        for x, like in zip(place.tensors, places[0].tensors, strict=True):
            if x.dtype == like.dtype and (x.stride(-1) == 1 or x.shape[-1] == 1):
                tensors.append(x)
                continue
            tensors.append(torch.empty(x.shape, dtype=like.dtype, device=x.device))
            late.append((x, tensors[-1]))
        found.append(Place(place.chunk, place.heads, tuple(tensors)))
    return found, late


def deliver(late: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copies what `writable` could not let a kernel write in place."""
    for target, source in late:
        target.copy_(source)


def unit(x: Tensor) -> Tensor:
    """`x`, copied unless its last stride is 1."""
    return x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)


def alignment(*tensors: Tensor) -> int:
    """Elements that all rows begin at a multiple of: those of 16 bytes, or 1."""
    for x in tensors:
        size = x.element_size()
        if x.data_ptr() % 16 or any(stride * size % 16 for stride in x.stride()[:-1]):
            return 1
    return 16 // tensors[0].element_size()


def alike(tensors: Sequence[Tensor]) -> bool:
    """Whether all have one row stride, small enough for 32 bits within a tile.

    What then stays the same in a loop takes registers, which dK and dV lack above 64.
    """
    strides = {x.stride(2) for x in tensors}
    return len(strides) == 1 and max(strides) < 2**22


def width(dim: int) -> int:
    """The power of two that holds a head_dim, at least 16: what a tile is wide."""
    return max(16, 1 << (dim - 1).bit_length())


def precision(x: Tensor) -> str:
    """The input precision of products: float32 stays float32."""
    return "ieee" if x.dtype == torch.float32 else "tf32"
