"""Masks given as Python functions over torch index tensors."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from tests.masks.truth import assert_grid_shows, truth_of
from ultraattn import masks
from ultraattn.chunks import Chunk, Chunks, split
from ultraattn.errors import InputError
from ultraattn.masks import Lengths

DOCUMENT = torch.tensor([0] * 7 + [1] * 9 + [2] * 4)
TABLE = torch.rand(20, 20, generator=torch.Generator().manual_seed(7)) < 0.4


@pytest.mark.parametrize(
    ("function", "equal"),
    [
        (lambda b, h, q, k: q >= k, masks.causal()),
        (lambda b, h, q, k: (q >= k) & (q - k < 5), masks.sliding_window(5)),
        (lambda b, h, q, k: DOCUMENT[q] == DOCUMENT[k], masks.document([7, 9, 4], False)),
        (lambda b, h, q, k: torch.where(q >= 0, k <= q, torch.tensor(False)), masks.causal()),
        (lambda b, h, q, k: torch.tensor(True), masks.full()),
        (lambda b, h, q, k: torch.tensor([True]), masks.full()),
        (lambda b, h, q, k: True, masks.full()),
        (lambda b, h, q, k: k < 3, masks.from_ranges([(0, 20)], [(0, 3)])),
        (lambda b, h, q, k: q < 3, masks.from_ranges([(0, 3)], [(0, 20)])),
        (lambda b, h, q, k: (h >= 0) & (b >= 0) & (q >= k), masks.causal()),
    ],
)
def test_a_function_gives_the_grid_of_the_mask_it_describes(function, equal):
    chunks = split(20, 3)
    mask = masks.from_mask_mod(function)
    grid = mask.grid(chunks, chunks, heads=2, batch=2)
    assert grid == equal.grid(chunks, chunks)
    lengths = Lengths(20, 20)
    assert np.array_equal(truth_of(mask, lengths), truth_of(equal, lengths))


def test_a_captured_table_over_stripes():
    stripes = Chunks.make(20, [Chunk(r, 20, 3) for r in (2, 0, 1)])
    grid = masks.from_mask_mod(lambda b, h, q, k: TABLE[q, k]).grid(stripes, split(20, 4))
    assert_grid_shows(grid, TABLE.numpy())


def test_heads_that_differ_are_kept_and_each_is_exact():
    window = torch.tensor([2, 5, 50])
    mask = masks.from_mask_mod(lambda b, h, q, k: (q >= k) & (q - k < window[h]))
    grid = mask.grid(split(20, 4), split(20, 4), heads=3)
    assert grid.heads == 3
    for head, size in enumerate(window.tolist()):
        assert_grid_shows(grid, truth_of(masks.sliding_window(size), Lengths(20, 20)), head)


def test_heads_that_differ_in_one_late_row_are_found():
    mask = masks.from_mask_mod(lambda b, h, q, k: (q >= k) & ((h < 2) | (q != 19)))
    assert mask.grid(split(20, 4), split(20, 4), heads=3).heads == 3


def test_heads_differ_within_a_combination():
    mask = masks.from_mask_mod(lambda b, h, q, k: q - k < 4 + h) & masks.causal()
    grid = mask.grid(split(20, 4), split(20, 4), heads=2)
    assert grid.heads == 2
    for head in range(2):
        truth = truth_of(masks.sliding_window(4 + head), Lengths(20, 20))
        assert_grid_shows(grid, truth, head)


def test_a_head_that_matters_needs_the_number_of_heads():
    mask = masks.from_mask_mod(lambda b, h, q, k: q - k < 4 + h)
    with pytest.raises(InputError, match="pass heads="):
        mask.grid(split(20, 4), split(20, 4))


def test_a_mask_that_varies_over_the_batch_is_refused():
    ids = torch.stack([DOCUMENT, DOCUMENT.flip(0)])
    mask = masks.from_mask_mod(lambda b, h, q, k: ids[b, q] == ids[b, k])
    for batch in (None, 2):
        with pytest.raises(InputError, match="packed sequences"):
            mask.grid(split(20, 4), split(20, 4), batch=batch)


def test_a_batch_table_of_one_sample_cannot_vary():
    ids = DOCUMENT[None]
    mask = masks.from_mask_mod(lambda b, h, q, k: ids[b, q] == ids[b, k])
    expected = masks.document([7, 9, 4], causal=False)
    assert mask.grid(split(20, 4), split(20, 4)) == expected.grid(split(20, 4), split(20, 4))


def test_samples_that_agree_pass_only_when_all_were_looked_at():
    ids = torch.stack([DOCUMENT, DOCUMENT, DOCUMENT])
    mask = masks.from_mask_mod(lambda b, h, q, k: ids[b, q] == ids[b, k])
    with pytest.raises(InputError, match="pass batch="):
        mask.grid(split(20, 4), split(20, 4))
    expected = masks.document([7, 9, 4], causal=False)
    found = mask.grid(split(20, 4), split(20, 4), batch=3)
    assert found == expected.grid(split(20, 4), split(20, 4))


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (lambda b, h, q, k: q - k, r"torch.int64; expected torch.bool"),
        (lambda b, h, q, k: (q >= k).float(), r"torch.float32; expected torch.bool"),
        (lambda b, h, q, k: torch.ones(3, 20, dtype=torch.bool), r"\(3, 20\), which does not"),
        (lambda b, h, q, k: torch.ones(20, dtype=torch.bool), r"\(20,\), which does not"),
        (lambda b, h, q, k: DOCUMENT[q + 5] == k, r"raised IndexError"),
        (lambda b, h, q, k: None, r"raised"),
    ],
)
def test_functions_of_another_dtype_or_shape_are_refused(function, what):
    with pytest.raises(InputError, match=what):
        masks.from_mask_mod(function).grid(split(20, 1), split(20, 1))


def test_what_is_no_function_is_refused():
    with pytest.raises(InputError, match="expected a function"):
        masks.from_mask_mod(TABLE)


def test_progress_ends_at_the_number_of_queries():
    seen = []
    mask = masks.from_mask_mod(lambda b, h, q, k: q >= k)
    mask.grid(split(21, 4), split(21, 2), progress=lambda done, all_: seen.append((done, all_)))
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1] == (21, 21)


def test_its_cost_is_said_above_64k_tokens(caplog):
    mask = masks.from_mask_mod(lambda b, h, q, k: q >= k)
    with caplog.at_level(logging.WARNING, logger="ultraattn"):
        mask.grid(split(2, 1), split(65536, 2))
        assert not caplog.records
        mask.grid(split(2, 1), split(65537, 2))
    assert "token by token" in caplog.text
    assert "65537 keys" in caplog.text


def test_it_has_no_intervals_and_no_spec():
    mask = masks.from_mask_mod(lambda b, h, q, k: q >= k)
    for one in (mask, mask & masks.full()):
        assert not one.savable
        with pytest.raises(InputError, match="no key intervals"):
            one.intervals([0], Lengths(4, 4))
        with pytest.raises(InputError, match="Python function"):
            one.spec()
