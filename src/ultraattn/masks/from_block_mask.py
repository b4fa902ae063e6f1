"""The mask given as FlexAttention's BlockMask, with its own block sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ultraattn.errors import InputError
from ultraattn.masks.base import JSON, Lengths, Mask, Table, whole
from ultraattn.masks.draw import show
from ultraattn.masks.from_mask_mod import call_mask_mod, dense_mask_mod
from ultraattn.masks.grid import Ints
from ultraattn.masks.strips import Bools, Pieces, Strips

EMPTY, FULL, PARTIAL = 0, 1, 2


@dataclass(frozen=True, repr=False)
class BlockMaskMask(Mask):
    """See `from_block_mask`. `states` int8 (heads, query blocks, key blocks): EMPTY, FULL, PARTIAL.

    Savable and analytic only without PARTIAL blocks, since those ask a Python function.
    """

    states: Table
    q_length: int
    kv_length: int
    q_block: int
    kv_block: int
    function: Callable[..., Any] | None

    name = "from_block_mask"

    @property
    def savable(self) -> bool:
        return self.function is None

    @property
    def analytic(self) -> bool:
        return self.function is None and len(self.states.values) == 1

    def params(self) -> dict[str, JSON]:
        states: list[JSON] = self.states.values.tolist()
        return {
            "lengths": [self.q_length, self.kv_length],
            "block_size": [self.q_block, self.kv_block],
            "states": states,
        }

    def check(self, lengths: Lengths, heads: int | None = None) -> None:
        if lengths != Lengths(self.q_length, self.kv_length):
            raise InputError(
                f"a block mask of {Lengths(self.q_length, self.kv_length)} for {lengths}: expected "
                "the lengths it was made for; make it again with Q_LEN and KV_LEN of the sequence"
            )
        own = len(self.states.values)
        if heads is not None and own not in (1, heads):
            raise InputError(
                f"a block mask of {own} heads for {heads} heads: expected 1 or {heads}; make it "
                "again with H of the attention"
            )

    def visible(
        self, q: npt.ArrayLike, kv: npt.ArrayLike, lengths: Lengths, head: int = 0, batch: int = 0
    ) -> Bools:
        self.check(lengths)
        q, kv = np.asarray(q, dtype=np.int64), np.asarray(kv, dtype=np.int64)
        states = self.states.values
        state = states[head if len(states) > 1 else 0, q // self.q_block, kv // self.kv_block]
        if self.function is None:
            return np.asarray(state == FULL)
        truth = call_mask_mod(self.function, np.int64(batch), np.int64(head), q, kv)
        return np.asarray((state == FULL) | ((state == PARTIAL) & truth))

    def dense(
        self,
        q: Ints,
        kv: Ints,
        lengths: Lengths,
        *,
        heads: int | None = None,
        batch: int | None = None,
    ) -> Bools:
        own = len(self.states.values)
        state = self.states.values[:, (q // self.q_block)[:, None], (kv // self.kv_block)[None]]
        truth: Bools = state == FULL
        asked = np.flatnonzero((state == PARTIAL).any(axis=(0, 1)))
        if self.function is not None and len(asked):
            heads = own if heads is None and own > 1 else heads
            said = dense_mask_mod(self.function, q, kv[asked], heads=heads, batch=batch)[0]
            truth = np.repeat(truth, len(said), axis=0) if own == 1 else truth
            truth[:, :, asked] |= (state[:, :, asked] == PARTIAL) & said
        return truth[None]

    def strips(self, lengths: Lengths) -> Strips:
        if not self.analytic:
            return super().strips(lengths)
        full = np.pad((self.states.values[0] == FULL).astype(np.int8), ((0, 0), (1, 1)))
        change = np.diff(full, axis=1)
        block, begin = np.nonzero(change == 1)
        end = np.nonzero(change == -1)[1]
        first = block * self.q_block
        runs = Pieces.of(first, first + self.q_block, begin * self.kv_block, end * self.kv_block)
        return runs.strips(lengths.q, lengths.kv)

    def __str__(self) -> str:
        heads, rows, columns = self.states.values.shape
        return (
            f"{self.name}({heads} heads, {rows}x{columns} blocks of {self.q_block}x{self.kv_block})"
        )


def from_block_mask(block_mask: Any) -> BlockMaskMask:
    """What a ``torch.nn.attention.flex_attention.BlockMask`` shows, by its own block lists.

    Reads `kv_num_blocks`, `kv_indices`, their `full_` partners, `BLOCK_SIZE`, `seq_lengths` and,
    for the blocks that are not full, `mask_mod`. The heads axis is kept; a batch axis longer than 1
    must repeat one mask.

    Raises:
        InputError: it is no BlockMask, or its samples differ.
    """
    try:
        q_block, kv_block = (whole(n, "BLOCK_SIZE") for n in block_mask.BLOCK_SIZE)
        q_length, kv_length = (whole(n, "seq_lengths", least=0) for n in block_mask.seq_lengths)
        function = block_mask.mask_mod
        lists = [(PARTIAL, block_mask.kv_num_blocks, block_mask.kv_indices)]
        if block_mask.full_kv_num_blocks is not None:
            lists.append((FULL, block_mask.full_kv_num_blocks, block_mask.full_kv_indices))
    except (AttributeError, TypeError, ValueError) as error:
        raise InputError(
            f"from_block_mask was given {type(block_mask).__name__}: {error}; expected what "
            "torch.nn.attention.flex_attention.create_block_mask returns"
        ) from error
    batch, heads, rows = lists[0][1].shape
    columns = -(-kv_length // kv_block)
    if rows != -(-q_length // q_block):
        raise InputError(
            f"a block mask of {rows} query blocks of {q_block} for {q_length} queries: expected "
            f"{-(-q_length // q_block)}; make it again for these lengths"
        )
    states = np.zeros((batch, heads, rows, columns), dtype=np.int8)
    for state, counts, indices in lists:
        count, index = _array(counts), _array(indices)
        listed = np.nonzero(np.arange(index.shape[-1]) < count[..., None])
        if index[listed].max(initial=0) >= max(columns, 1):
            raise InputError(
                f"a block mask that lists key block {index[listed].max()} of {kv_block} for "
                f"{kv_length} keys: expected at most {columns} blocks; make it again for these "
                "lengths"
            )
        states[(*listed[:3], index[listed])] = state
    if (states != states[:1]).any():
        raise InputError(
            f"a block mask of {batch} samples that differ: expected one mask for all samples; plan "
            "them as packed sequences (one sequence, masks.document) instead"
        )
    if getattr(function, "__name__", "") == "noop_mask":
        # BlockMask.from_kv_blocks without a mask_mod: every listed block is seen whole.
        states[states == PARTIAL] = FULL
    partial = bool((states == PARTIAL).any())
    return BlockMaskMask(
        Table(states[0]), q_length, kv_length, q_block, kv_block, function if partial else None
    )


def block_mask_of_spec(lengths: Any, block_size: Any, states: Any) -> BlockMaskMask:
    """The inverse of `BlockMaskMask.params`, for masks without partial blocks."""
    (q, kv), (q_block, kv_block) = lengths, block_size
    table = np.array(states)
    blocks = (
        -(-whole(q, "queries", 0) // whole(q_block, "query block")),
        -(-whole(kv, "keys", 0) // whole(kv_block, "key block")),
    )
    if table.ndim != 3 or table.shape[1:] != blocks or not np.isin(table, (EMPTY, FULL)).all():
        raise InputError(
            f"states of a block mask of shape {table.shape}: expected zeros and ones of shape "
            f"(heads, {blocks[0]}, {blocks[1]})"
        )
    return BlockMaskMask(Table(table), q, kv, q_block, kv_block, None)


def _array(values: Any) -> Ints:
    """A torch tensor on any device, or an array, as int64."""
    values = values.detach().cpu().numpy() if hasattr(values, "detach") else values
    return np.asarray(values, dtype=np.int64)


def main() -> None:
    """Draws one of causal documents."""
    from torch.nn.attention.flex_attention import create_block_mask

    def documents(batch: Any, head: Any, q_index: Any, kv_index: Any) -> Any:
        return (q_index // 100 == kv_index // 100) & (q_index >= kv_index)

    block_mask = create_block_mask(documents, None, None, 512, 512, device="cpu", BLOCK_SIZE=64)
    show(from_block_mask(block_mask), Lengths(512, 512))


if __name__ == "__main__":
    main()
