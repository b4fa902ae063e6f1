"""FlexAttention's block masks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from tests.masks.truth import assert_grid_shows, truth_of, truth_of_intervals
from ultraattn import masks
from ultraattn.chunks import Chunk, Chunks, split
from ultraattn.errors import InputError
from ultraattn.masks import Lengths


def windowed(b, h, q, k):
    return (q >= k) & (q - k < 9)


def flex(function, q=50, kv=50, batch=None, heads=None, size=8):
    return create_block_mask(function, batch, heads, q, kv, device="cpu", BLOCK_SIZE=size)


@pytest.mark.parametrize("size", [8, 16, (8, 16), 128])
def test_it_shows_what_its_function_does_in_any_block_size(size):
    mask = masks.from_block_mask(flex(windowed, size=size))
    truth = truth_of(masks.sliding_window(9), Lengths(50, 50))
    assert np.array_equal(truth_of(mask, Lengths(50, 50)), truth)
    stripes = Chunks.make(50, [Chunk(r, 50, 3) for r in range(3)])
    assert_grid_shows(mask.grid(stripes, split(50, 4)), truth)


def test_other_lengths_on_the_two_axes():
    mask = masks.from_block_mask(flex(windowed, 30, 50))
    truth = np.array([[windowed(0, 0, q, k) for k in range(50)] for q in range(30)])
    assert_grid_shows(mask.grid(split(30, 3), split(50, 4)), truth)


def test_its_heads_are_kept():
    def by_head(b, h, q, k):
        return (q >= k) & (q - k < 4 + 3 * h)

    mask = masks.from_block_mask(flex(by_head, heads=3))
    grid = mask.grid(split(50, 4), split(50, 4), heads=3)
    assert grid.heads == 3
    for head in range(3):
        assert_grid_shows(grid, truth_of(masks.sliding_window(4 + 3 * head), Lengths(50, 50)), head)
    with pytest.raises(InputError, match="3 heads for 4"):
        mask.grid(split(50, 4), split(50, 4), heads=4)


def test_block_lists_alone_are_savable_and_analytic():
    table = torch.rand(5, 4, generator=torch.Generator().manual_seed(1)) < 0.5
    counts = table.sum(1).to(torch.int32)[None, None]
    indices = table.to(torch.int32).argsort(dim=1, descending=True, stable=True)[None, None]
    block_mask = BlockMask.from_kv_blocks(counts, indices.to(torch.int32), BLOCK_SIZE=8)
    mask = masks.from_block_mask(block_mask)
    truth = np.kron(table.numpy(), np.ones((8, 8), dtype=bool))
    assert np.array_equal(truth_of_intervals(mask, Lengths(40, 32)), truth)
    assert_grid_shows(mask.grid(split(40, 3), split(32, 3)), truth)
    assert masks.from_spec(mask.spec()) == mask


def test_partial_blocks_hold_a_function_and_are_not_savable():
    mask = masks.from_block_mask(flex(windowed))
    assert not mask.savable
    with pytest.raises(InputError, match="Python function"):
        mask.spec()


def test_samples_that_differ_are_refused():
    def by_sample(b, h, q, k):
        return (q >= k) & (q - k < 4 + 20 * b)

    with pytest.raises(InputError, match="packed sequences"):
        masks.from_block_mask(flex(by_sample, batch=2))


def test_equal_samples_whose_function_differs_within_blocks_are_refused():
    def within(b, h, q, k):
        return (q >= k) & ((q - k != 3) | (q // 8 != k // 8) | (b == 0))

    mask = masks.from_block_mask(flex(within, batch=2))
    with pytest.raises(InputError, match="packed sequences"):
        mask.grid(split(50, 2), split(50, 2), batch=2)


def test_equal_samples_are_one_mask():
    mask = masks.from_block_mask(flex(windowed, batch=2))
    expected = masks.sliding_window(9).grid(split(50, 3), split(50, 3))
    assert mask.grid(split(50, 3), split(50, 3)) == expected


def test_other_lengths_than_its_own_are_refused():
    mask = masks.from_block_mask(flex(windowed))
    with pytest.raises(InputError, match="50 queries and 50 keys for 64 queries and 64 keys"):
        mask.grid(split(64, 2), split(64, 2))


def test_block_lists_that_name_blocks_past_the_lengths_are_refused():
    counts = torch.ones(1, 1, 2, dtype=torch.int32)
    indices = torch.full((1, 1, 2, 2), 1, dtype=torch.int32)
    for lengths, what in (((16, 8), "key block 1"), ((24, 16), "2 query blocks of 8 for 24")):
        block_mask = BlockMask.from_kv_blocks(
            counts, indices, BLOCK_SIZE=8, seq_lengths=lengths, compute_q_blocks=False
        )
        with pytest.raises(InputError, match=what):
            masks.from_block_mask(block_mask)


def test_what_is_no_block_mask_is_refused():
    with pytest.raises(InputError, match="create_block_mask"):
        masks.from_block_mask(torch.ones(4, 4))


def test_it_combines_with_analytic_masks():
    mask = masks.from_block_mask(flex(windowed)) | masks.document([10, 40])
    lengths = Lengths(50, 50)
    truth = truth_of(masks.sliding_window(9), lengths) | truth_of(masks.document([10, 40]), lengths)
    assert_grid_shows(mask.grid(split(50, 3), split(50, 5)), truth)
