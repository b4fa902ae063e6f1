"""The masks of the matrix, made for given lengths; functions stand here so that ranks find them."""

from __future__ import annotations

from collections.abc import Callable

from torch.nn.attention.flex_attention import create_block_mask

from ultraattn import masks
from ultraattn.masks import Mask

BLOCK = 32
"""Block size of the FlexAttention mask."""


def dotted(batch, head, q_index, kv_index):
    """A pattern that no band or rectangle holds; the same for all heads."""
    return ((q_index * 7 + kv_index * 5) % 11 < 4) | (kv_index == 0)


def by_head(batch, head, q_index, kv_index):
    """Each head looks back another distance; head 0 sees nothing at all of the first key."""
    return (
        (q_index - kv_index < 5 * (head + 1))
        & (q_index + head >= kv_index)
        & ((kv_index > 0) | (head > 0))
    )


def ragged_causal(batch, head, q_index, kv_index):
    return (q_index >= kv_index) & ((q_index // 50) % 3 != (kv_index // 40) % 3)


def document(q: int, kv: int) -> Mask:
    lengths = [q // 3, q // 7, 0, min(1, q)]
    return masks.document([*lengths, q - sum(lengths)])


def ranges(q: int, kv: int) -> Mask:
    return masks.from_ranges(
        [(0, q // 2), (q // 3, q), (0, q // 4)],
        [(0, -(-kv // 3)), (kv // 4, kv), (kv // 2, kv)],
        ["full", "causal", "inverse_causal"],
    )


def blocks(q: int, kv: int) -> Mask:
    if q == kv:
        return masks.from_blocks(
            [
                ["causal", "empty", "empty", "full", "empty"],
                ["full", "causal", "empty", "empty", "empty"],
                ["empty", "full", "full", "empty", "empty"],
                ["empty", "empty", "empty", "empty", "empty"],
                ["full", "empty", "empty", "full", "causal"],
            ]
        )
    return masks.from_blocks([[1, 0, 0, 1, 0], [0, 1, 1, 0, 0], [0, 0, 0, 0, 0], [1, 0, 1, 0, 1]])


def block_mask(q: int, kv: int) -> Mask:
    return masks.from_block_mask(
        create_block_mask(ragged_causal, None, None, q, kv, device="cpu", BLOCK_SIZE=BLOCK)
    )


def window(q: int, kv: int) -> Mask:
    return masks.sliding_window(max(1, kv // 6))


MASKS: dict[str, Callable[[int, int], Mask]] = {
    "full": lambda q, kv: masks.full(),
    "causal": lambda q, kv: masks.causal(),
    "strided": lambda q, kv: masks.strided(),
    "global_local": lambda q, kv: masks.global_local(),
    "star": lambda q, kv: masks.star(),
    "streaming": lambda q, kv: masks.streaming(),
    "sliding_window": window,
    "document": document,
    "from_ranges": ranges,
    "from_blocks": blocks,
    "from_block_mask": block_mask,
    "from_mask_mod": lambda q, kv: masks.from_mask_mod(dotted),
    "from_mask_mod_by_head": lambda q, kv: masks.from_mask_mod(by_head),
    "document & window": lambda q, kv: document(q, kv) & window(q, kv),
    "strided | causal": lambda q, kv: masks.strided() | masks.causal(),
    "(streaming | star) & ranges": lambda q, kv: (masks.streaming() | masks.star()) & ranges(q, kv),
    "mask_mod & causal": lambda q, kv: masks.from_mask_mod(dotted) & masks.causal(),
}
"""Name to mask, for (queries, keys)."""
