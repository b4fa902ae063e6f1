"""Compares the blocks of a program with the mask itself, cell by cell."""

from __future__ import annotations

import numpy as np

from ultraattn.errors import PlanError
from ultraattn.masks import Grid
from ultraattn.masks.grid import BlockKind
from ultraattn.plans.passes import Pass
from ultraattn.plans.problem import Problem
from ultraattn.plans.program import Program


def check_mask(pass_: Pass, problem: Problem, program: Program, grid: Grid) -> None:
    """Raises PlanError where a block's kind, band or weight is not that of the mask's grid.

    That no visible block is missing follows from the weights, which add up to
    ``problem.visible_pairs`` (`ultraattn.plans.check`).
    """
    if grid.digest() != problem.mask_digest:
        raise PlanError(
            f"{pass_} pass, mask: {problem.mask_label} has grid {grid.digest()[:12]} over the "
            f"plan's chunks, the plan was made for {problem.mask_digest[:12]}; plan again"
        )
    b = program.blocks
    band = b.kind == BlockKind.BAND.code
    wrong = np.zeros(len(b.kind), dtype=np.bool_)
    weight = np.zeros_like(b.weight)
    varying = grid.heads > 1
    for head in range(problem.heads if varying else 1):
        cells = (0, head, b.q_chunk, b.kv_chunk)
        inside = (b.head_start <= head) & (head < b.head_stop) if varying else np.True_
        limits = (grid.lo[cells] != b.lo) | (grid.hi[cells] != b.hi)
        wrong |= inside & ((grid.kinds[cells] != b.kind) | (band & limits))
        weight += np.where(inside, grid.weights[cells], 0)
    expected = weight if varying else weight * (b.head_stop - b.head_start)
    found = np.flatnonzero(wrong | (expected != b.weight))
    if found.size:
        index = int(found[0])
        block = program.block_views[index]
        raise PlanError(
            f"{pass_} pass, mask: block {index} (query chunk {block.q_chunk}, key chunk "
            f"{block.kv_chunk}) is {block.kind} of {block.weight} pairs, "
            f"{problem.mask_label} shows another there"
        )
