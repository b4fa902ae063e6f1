"""The blocks of a plan are those of its mask, whatever a file says."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import ultraattn as ua
from ultraattn.errors import PlanError
from ultraattn.plans import Plan


def with_blocks(plan: Plan, **columns: Any) -> Plan:
    program = plan.forward.program
    blocks = dataclasses.replace(program.blocks, **columns)
    forward = dataclasses.replace(plan.forward, program=dataclasses.replace(program, blocks=blocks))
    return dataclasses.replace(plan, forward=forward)


@pytest.fixture(scope="module")
def plan() -> Plan:
    mask = ua.masks.sliding_window(24)
    return ua.plan(mask, seqlen=96, heads=2, head_dim=8, ranks=4, strategy="rows")


def test_a_band_moved_without_changing_its_weight_is_caught(plan: Plan) -> None:
    blocks = plan.forward.program.blocks
    at = int(np.flatnonzero(blocks.lo == 0)[0])
    lo, hi = blocks.lo.copy(), blocks.hi.copy()
    lo[at], hi[at] = -hi[at], 0  # The mirrored band: as many pairs, above the diagonal.
    with pytest.raises(PlanError, match=f"mask: block {at} "):
        with_blocks(plan, lo=lo, hi=hi).check()


def test_another_mask_is_refused(plan: Plan) -> None:
    plan.check_mask(ua.masks.sliding_window(24))
    with pytest.raises(PlanError, match="was made for"):
        plan.check_mask(ua.masks.sliding_window(25))


def test_a_mask_that_varies_by_head_is_compared_head_by_head() -> None:
    mask = ua.masks.from_mask_mod(lambda b, h, q, k: (q >= k) & (q - k < 16 * (h + 1)))
    plan = ua.plan(mask, seqlen=64, heads=4, head_dim=8, ranks=2, strategy="rows")
    plan.check_mask(mask)
    assert len(set(plan.forward.program.blocks.head_start.tolist())) > 1
    kind = plan.forward.program.blocks.kind.copy()
    kind[0] = 3 if kind[0] != 3 else 1
    with pytest.raises(PlanError, match="mask: block 0 "):
        with_blocks(plan, kind=kind).check_mask(mask)
