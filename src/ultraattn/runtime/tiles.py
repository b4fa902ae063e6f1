"""Computes a launch: the blocks of a tile, from a rank's values to partial results."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor as Array

from ultraattn.masks import Lengths, Mask
from ultraattn.masks.grid import BlockKind
from ultraattn.plans.head_ranges import HeadRange
from ultraattn.plans.passes import Pass
from ultraattn.plans.plan import RankPlan
from ultraattn.plans.program import Block, Compute
from ultraattn.plans.rank_program import RankProgram
from ultraattn.plans.tensors import Tensor, accumulate_dtype
from ultraattn.runtime.kernels import Piece, backward_row, forward_row
from ultraattn.runtime.pieces import DTYPES, Pieces
from ultraattn.runtime.sets import Sets

MASK_CACHE_BYTES = 64 * 2**20


class Tiles:
    """Computes the launches of one plan on one rank.

    Args:
        plan: what this rank loads of the plan.
        mask: gives the visible pairs of PARTIAL blocks.
        kernel: a kernel's name, or "auto".
        device: where masks are kept. On CUDA all of them stay, since captured graphs read them.
        deterministic: use kernels alone that give the same bits every time.
    """

    def __init__(
        self,
        plan: RankPlan,
        mask: Mask,
        kernel: str,
        device: torch.device | str = "cpu",
        deterministic: bool = False,
    ) -> None:
        self._plan = plan
        self._mask = mask
        self._kernel = kernel
        self._deterministic = deterministic
        self._device = torch.device(device)
        self._lengths = Lengths(plan.problem.q_len, plan.problem.kv_len)
        self._sets = Sets(plan, mask, kernel, self._device, deterministic)
        self._masks: OrderedDict[tuple[int, int], Array] = OrderedDict()
        self._mask_bytes = 0

    def run(
        self,
        pass_: Pass,
        task: Compute,
        program: RankProgram,
        pieces: Pieces,
        places: Mapping[int, Array],
    ) -> None:
        """Fills `places` with the partial results of the task's tile."""
        blocks = [program.blocks[block] for block in task.tile]
        launch = self._sets.of(pass_, task, blocks)
        if launch is not None and pass_ is Pass.FORWARD:
            self._sets.forward(launch, task, program, pieces, places)
        elif launch is not None:
            self._sets.backward(launch, task, program, pieces, places)
        elif pass_ is Pass.FORWARD:
            self._forward(task, blocks, program, pieces, places)
        else:
            self._backward(task, blocks, program, pieces, places)

    def _forward(
        self,
        task: Compute,
        blocks: list[Block],
        program: RankProgram,
        pieces: Pieces,
        places: Mapping[int, Array],
    ) -> None:
        lse_at: dict[tuple[int, int, int], int] = {}
        wanted: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        for number in places:
            value = program.values[number]
            if value.tensor is Tensor.LSE:
                lse_at[value.chunk, value.head_start, value.head_stop] = number
            elif value.tensor is Tensor.O:
                wanted[value.chunk].append((value.head_start, value.head_stop, number))
        for chunk, values in wanted.items():
            row = [block for block in blocks if block.q_chunk == chunk]
            for heads, line in self._lines(task, pieces, row, [v[:2] for v in values]):
                q = pieces.assemble(task.reads, Tensor.Q, chunk, heads)
                found = [self._piece(task, pieces, block, heads) for block in line]
                out, lse = forward_row(
                    q, found, self._plan.problem.scale, kernel=self._kernel,
                    deterministic=self._deterministic, dim_v=self._plan.problem.value_dim,
                )  # fmt: skip
                for start, stop, number in values:
                    a, b = max(start, heads[0]), min(stop, heads[1])
                    if a >= b:
                        continue
                    lse_number = lse_at[chunk, start, stop]
                    part, part_lse = (x[:, a - heads[0] : b - heads[0]] for x in (out, lse))
                    if pieces.adopt(number, part) and pieces.adopt(lse_number, part_lse):
                        continue
                    places[number][:, a - start : b - start].copy_(part)
                    places[lse_number][:, a - start : b - start].copy_(part_lse)

    def _backward(
        self,
        task: Compute,
        blocks: list[Block],
        program: RankProgram,
        pieces: Pieces,
        places: Mapping[int, Array],
    ) -> None:
        problem = self._plan.problem
        wide = DTYPES[accumulate_dtype(problem.dtype)]
        sums: dict[int, Array] = {}
        at = defaultdict(list)
        for number in places:
            value = program.values[number]
            at[value.tensor, value.chunk].append((value.head_start, value.head_stop, number))

        def add(tensor: Tensor, chunk: int, heads: HeadRange, part: Array) -> None:
            for start, stop, number in at[tensor, chunk]:
                a, b = max(start, heads[0]), min(stop, heads[1])
                if a >= b:
                    continue
                some, known = part[:, a - heads[0] : b - heads[0]], sums.get(number)
                if known is None and (a, b) == (start, stop):
                    sums[number] = some
                    continue
                if known is None:
                    known = torch.zeros_like(places[number], dtype=wide)
                sums[number] = known = known.to(wide)
                known[:, a - start : b - start] += some

        rows: dict[int, list[Block]] = defaultdict(list)
        for block in blocks:
            rows[block.q_chunk].append(block)
        for chunk, row in rows.items():
            ranges = [(block.head_start, block.head_stop) for block in row]
            for heads, line in self._lines(task, pieces, row, ranges):
                q, dout, lse, delta = (
                    pieces.assemble(task.reads, tensor, chunk, heads)
                    for tensor in (Tensor.Q, Tensor.DO, Tensor.LSE, Tensor.DELTA)
                )
                found = [self._piece(task, pieces, block, heads) for block in line]
                dq, grads = backward_row(
                    dout, q, lse, delta, found, problem.scale, kernel=self._kernel,
                    deterministic=self._deterministic, wide=True,
                )  # fmt: skip
                add(Tensor.DQ, chunk, heads, dq)
                kv_heads = problem.kv_range(*heads)
                for block, (dk, dv) in zip(line, grads, strict=True):
                    add(Tensor.DK, block.kv_chunk, kv_heads, dk)
                    add(Tensor.DV, block.kv_chunk, kv_heads, dv)
        for number, place in places.items():
            if number not in sums:
                place.zero_()
            elif not pieces.adopt(number, sums[number]):
                place.copy_(sums[number])

    def _lines(
        self, task: Compute, pieces: Pieces, row: list[Block], ranges: list[HeadRange]
    ) -> list[tuple[HeadRange, list[Block]]]:
        """Head ranges that hold `ranges`, each with the blocks of a row of chunks for its heads.

        Neighbours with the same blocks are one where their inputs stand side by side: a launch
        over more heads fills the device better than two.
        """
        found: list[tuple[HeadRange, list[Block]]] = []
        for heads, line in _by_heads(row, ranges):
            if found and found[-1][0][1] == heads[0] and _alike(found[-1][1], line):
                joined = found[-1][0][0], heads[1]
                if self._stands(task, pieces, row[0].q_chunk if row else -1, line, joined):
                    found[-1] = joined, found[-1][1]
                    continue
            found.append((heads, line))
        return found

    def _stands(
        self, task: Compute, pieces: Pieces, chunk: int, line: list[Block], heads: HeadRange
    ) -> bool:
        """Whether each input of blocks stands in one value for all these heads."""
        problem = self._plan.problem
        kv_heads = problem.kv_range(*heads)
        return all(
            pieces.stands(task.reads, tensor, chunk, heads)
            for tensor in (Tensor.Q, Tensor.DO, Tensor.LSE, Tensor.DELTA)
        ) and all(
            pieces.stands(task.reads, tensor, block.kv_chunk, kv_heads)
            for tensor in (Tensor.K, Tensor.V)
            for block in line
        )

    def _piece(self, task: Compute, pieces: Pieces, block: Block, heads: HeadRange) -> Piece:
        problem = self._plan.problem
        kv_heads = problem.kv_range(*heads)
        return Piece(
            k=pieces.assemble(task.reads, Tensor.K, block.kv_chunk, kv_heads),
            v=pieces.assemble(task.reads, Tensor.V, block.kv_chunk, kv_heads),
            kv_of_head=tuple(head // problem.group - kv_heads[0] for head in range(*heads)),
            kind=block.kind,
            lo=block.lo,
            hi=block.hi,
            mask=self._visible(block, heads) if block.kind is BlockKind.PARTIAL else None,
        )

    def _visible(self, block: Block, heads: HeadRange) -> Array:
        """The visible pairs of a PARTIAL block: bool, (1 or heads, rows, columns)."""
        key = (block.q_chunk, block.kv_chunk)
        table = self._masks.get(key)
        if table is None:
            q = self._plan.q_layout.chunks[block.q_chunk].tokens()
            kv = self._plan.kv_layout.chunks[block.kv_chunk].tokens()
            truth = self._mask.dense(q, kv, self._lengths, heads=self._plan.problem.heads)
            table = torch.from_numpy(np.array(truth[0])).to(self._device)
            self._masks[key] = table
            self._mask_bytes += table.numel()
            keep_all = self._device.type == "cuda"
            while not keep_all and self._mask_bytes > MASK_CACHE_BYTES and len(self._masks) > 1:
                self._mask_bytes -= self._masks.popitem(last=False)[1].numel()
        self._masks.move_to_end(key)
        return table if len(table) == 1 else table[heads[0] : heads[1]]


def _by_heads(
    blocks: Iterable[Block], ranges: Iterable[HeadRange]
) -> list[tuple[HeadRange, list[Block]]]:
    """Cuts head ranges where they or the blocks of a row differ by head."""
    blocks, ranges = list(blocks), list(ranges)
    cuts = {h for some in ranges for h in some}
    cuts |= {h for b in blocks for h in (b.head_start, b.head_stop)}
    return [
        ((a, b), [x for x in blocks if x.head_start <= a and b <= x.head_stop])
        for a, b in pairwise(sorted(cuts))
        if any(start <= a and b <= stop for start, stop in ranges)
    ]


def _alike(some: list[Block], others: list[Block]) -> bool:
    """Whether two lists hold the same blocks but for their heads."""
    keys = [[(b.kv_chunk, b.kind, b.lo, b.hi) for b in line] for line in (some, others)]
    return keys[0] == keys[1]
