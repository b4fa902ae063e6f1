"""Masks by name and from saved specs, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.masks.truth import random_mask
from ultraattn import masks
from ultraattn.chunks import split
from ultraattn.errors import InputError
from ultraattn.masks import Lengths

EVERY = [
    masks.full(),
    masks.causal(),
    masks.sliding_window(4096),
    masks.document([3, 4, 5], causal=False),
    masks.strided(8, 2, 2),
    masks.global_local(8, 2, 3),
    masks.star(5),
    masks.streaming(9, 2, 4),
    masks.from_ranges([(0, 4), (2, 9)], [(0, 3), (1, 5)], ["full", "causal"]),
    masks.from_blocks([["full", "empty"], [1, "causal"]]),
    masks.causal() & masks.sliding_window(3) | masks.star(),
]


@pytest.mark.parametrize("mask", EVERY, ids=str)
def test_a_spec_goes_through_json_and_makes_an_equal_mask(mask):
    spec = json.loads(json.dumps(mask.spec()))
    again = masks.from_spec(spec)
    assert again == mask
    assert hash(again) == hash(mask)
    assert again.spec() == mask.spec()
    assert {"name": mask.name, **mask.params()} == mask.spec()


def test_every_name_is_tried_above():
    assert set(masks.NAMES) | {"and", "or"} == {mask.name for mask in EVERY} | {"and"}


@settings(deadline=None, derandomize=True, max_examples=40)
@given(st.integers(0, 10**9), st.integers(1, 30))
def test_specs_of_combinations_nest(seed, length):
    mask = random_mask(np.random.default_rng(seed), Lengths(length, length), depth=3)
    assert masks.from_spec(json.loads(json.dumps(mask.spec()))) == mask


def test_masks_compare_by_value():
    assert masks.strided() == masks.strided(16, 4, 3)
    assert masks.strided() != masks.strided(16, 4, 2)
    assert masks.causal() & masks.full() != masks.causal() | masks.full()
    assert masks.from_blocks([[1, 0]]) == masks.from_blocks(np.array([[True, False]]))


def test_labels_are_short_and_readable():
    assert str(masks.sliding_window(4096)) == "sliding_window(window=4096)"
    assert str(masks.causal()) == repr(masks.causal()) == "causal"
    assert str((masks.causal() & masks.full()) | masks.star()) == "(causal & full) | star(grid=4)"
    assert len(str(masks.document([7] * 1000))) < 80


def test_by_name_takes_the_factorys_parameters():
    assert masks.by_name("sliding_window", window=4) == masks.sliding_window(4)
    assert masks.by_name("strided", width=2) == masks.strided(width=2)
    assert masks.NAMES["strided"].defaults == {"grid": 16, "period": 4, "width": 3}
    assert masks.NAMES["sliding_window"].required == ("window",)
    assert masks.NAMES["document"].parameters == ("lengths", "causal")


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda: masks.by_name("casual"), "unknown mask 'casual'; choose one of full, causal,"),
        (lambda: masks.by_name("star", window=3), "does not take 'window'; it takes grid"),
        (lambda: masks.by_name("full", window=3), "it takes no parameters"),
        (lambda: masks.by_name("sliding_window"), "needs 'window'"),
        (lambda: masks.sliding_window(0), "window is 0; expected a whole number of at least 1"),
        (lambda: masks.sliding_window(2.5), "window is 2.5"),
        (lambda: masks.sliding_window(True), "window is True"),
        (lambda: masks.document([3, -1]), "document length is -1"),
        (lambda: masks.document(7), "lengths is 7; expected a list"),
        (lambda: masks.document([7], causal="yes"), "causal is 'yes'; expected True or False"),
        (lambda: masks.strided(period=0), "period is 0"),
        (lambda: masks.from_ranges([(0, 4)], [(0, 4), (1, 2)]), "1 query ranges, 2 key ranges"),
        (lambda: masks.from_ranges([(4, 0)], [(0, 4)]), "start <= stop"),
        (lambda: masks.from_ranges([(0, 4)], [(0, 4)], "diagonal"), "choose one of full, causal"),
        (lambda: masks.from_blocks([[1, 0], [1]]), r"lengths \[1, 2\]"),
        (lambda: masks.from_blocks([[1, 5]]), "table cell 5; choose"),
        (lambda: masks.from_blocks([[1, 2]]), "expected a square table"),
        (lambda: masks.from_spec({"window": 3}), "expected an object with a name"),
        (lambda: masks.from_spec({"name": "and", "masks": []}), "expected two specs"),
        (lambda: masks.from_spec({"name": "star", "size": 3}), "does not take 'size'"),
        (lambda: masks.causal().grid([0, 5, 3], [0, 3]), "token edges"),
    ],
)
def test_impossible_arguments_are_named(call, what):
    with pytest.raises(InputError, match=what):
        call()


@pytest.mark.parametrize(
    ("mask", "q", "kv", "what"),
    [
        (masks.document([3, 4]), 8, 8, "2 documents of 7 tokens in all over a sequence of 8"),
        (masks.document([3, 4]), 7, 8, "expected equal lengths"),
        (masks.strided(), 7, 8, "expected equal lengths"),
        (masks.global_local(), 7, 8, "expected equal lengths"),
        (masks.star(), 7, 8, "expected equal lengths"),
        (masks.streaming(), 7, 8, "expected equal lengths"),
        (masks.from_blocks([[1, 0], [0, 1]]), 7, 8, "expected equal lengths"),
        (masks.from_ranges([(0, 9)], [(0, 4)]), 8, 8, r"query range \(0, 9\)"),
        (masks.from_ranges([(0, 4)], [(0, 9)]), 8, 8, r"key range \(0, 9\)"),
        (masks.causal() | masks.star(), 7, 8, "expected equal lengths"),
    ],
    ids=str,
)
def test_lengths_that_a_mask_cannot_serve_are_refused_everywhere(mask, q, kv, what):
    lengths = Lengths(q, kv)
    for call in (
        lambda: mask.check(lengths),
        lambda: mask.grid(split(q, 2), split(kv, 2)),
        lambda: mask.intervals([0], lengths),
        lambda: mask.visible(0, 0, lengths),
    ):
        with pytest.raises(InputError, match=what):
            call()


def test_combining_with_something_else_is_a_type_error():
    with pytest.raises(TypeError):
        masks.causal() & True


def test_masks_do_not_import_torch():
    code = (
        "import sys; from ultraattn import masks; from ultraattn.chunks import split; "
        "(masks.causal() & masks.star()).grid(split(64, 4), split(64, 4)); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
