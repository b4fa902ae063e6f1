"""Masks as pictures in the terminal."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from ultraattn import masks
from ultraattn.masks import Lengths

PICTURE = """\
star(grid=4): 64 queries and 64 keys, 32.03 % visible
┌────────┐
│▒▒      │
│██▒▒    │
│██  ▒▒  │
│██    ▒▒│
└────────┘"""


def test_a_small_picture():
    assert masks.draw(masks.star(), Lengths(64, 64), parts=4) == PICTURE


def test_a_single_visible_pair_is_not_lost():
    mask = masks.from_ranges([(0, 1)], [(0, 1)])
    assert masks.draw(mask, Lengths(1000, 1000), parts=2).splitlines()[2].startswith("│░░")


@pytest.mark.parametrize("name", [*masks.NAMES, "from_mask_mod", "from_block_mask"])
def test_every_mask_draws_itself(name, capsys):
    importlib.import_module(f"ultraattn.masks.{name}").main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 35
    assert {len(line) for line in lines[1:]} == {66}


def test_the_module_runs_without_a_warning():
    command = [sys.executable, "-m", "ultraattn.masks.causal"]
    done = subprocess.run(command, capture_output=True, check=True)
    assert done.stdout.decode().startswith("causal: 256 queries")
    assert done.stderr == b""
