"""Computes a launch as one set of blocks by lists of tiles, where that is the faster way.

A launch as rows makes one call or more for every chunk of queries, and merges what they give: the
best for a few large full blocks. As a set it is one call whatever the number of blocks, and skips
what is masked: the best for windows, documents, and many small blocks. A partial result that is all
there is of a final one is written where the final one belongs, and its merge has nothing to do.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor as Array

from ultraattn.masks import Lengths, Mask
from ultraattn.masks.grid import BlockKind
from ultraattn.plans.head_ranges import HeadRange
from ultraattn.plans.passes import Pass
from ultraattn.plans.plan import RankPlan
from ultraattn.plans.program import Block, Compute, Merge, Value
from ultraattn.plans.rank_program import RankProgram
from ultraattn.plans.tensors import Tensor
from ultraattn.runtime.kernels import fa4, rates, sparse
from ultraattn.runtime.kernels.block_set import BlockSet, Extent, Place
from ultraattn.runtime.kernels.lists import Cell
from ultraattn.runtime.pieces import DTYPES, Pieces, part_of


@dataclass(frozen=True, eq=False)
class _Launch:
    """One launch as a set: its chunks in the order of the set, and the heads each needs."""

    blocks: BlockSet
    queries: tuple[int, ...]
    keys: tuple[int, ...]


class Sets:
    """The launches of one rank that are computed as sets.

    Args:
        plan: what this rank loads of the plan.
        mask: gives the visible pairs of PARTIAL blocks.
        kernel: a kernel's name, or "auto"; any other than "auto" and "sparse" makes no sets.
        device: where lists are kept.
        deterministic: make every launch a set that can be one: sets add up in a fixed order.
    """

    def __init__(
        self,
        plan: RankPlan,
        mask: Mask,
        kernel: str,
        device: torch.device,
        deterministic: bool = False,
    ) -> None:
        self._plan = plan
        self._mask = mask
        self._device = device
        self._launches: dict[tuple[Pass, int], _Launch | None] = {}
        self._finals: dict[Pass, dict[int, int]] = {}
        p = plan.problem
        why = sparse.refusal_of(device, DTYPES[p.dtype], p.head_dim, p.value_dim)
        self._serves = kernel in ("auto", sparse.name) and why is None
        self._always = kernel == sparse.name or deterministic
        self._bands = fa4.refusal_of(device, DTYPES[p.dtype], p.head_dim, p.value_dim) is None
        lengths = Lengths(p.q_len, p.kv_len)

        @lru_cache(maxsize=2)
        def truth(
            q_chunk: int, kv_chunk: int, first: int, last: int, by_key: bool
        ) -> npt.NDArray[np.bool_]:
            q = plan.q_layout.chunks[q_chunk].tokens()
            kv = plan.kv_layout.chunks[kv_chunk].tokens()
            q, kv = (q, kv[first:last]) if by_key else (q[first:last], kv)
            return np.asarray(mask.dense(q, kv, lengths, heads=p.heads)[0])

        self._truth = truth

    def of(self, pass_: Pass, task: Compute, blocks: Sequence[Block]) -> _Launch | None:
        """The launch as a set; None where rows are faster, or alone can."""
        key = pass_, task.index
        if key not in self._launches:
            self._launches[key] = (
                self._made(blocks) if self._serves and self._better(pass_, blocks) else None
            )
        return self._launches[key]

    def forward(
        self,
        launch: _Launch,
        task: Compute,
        program: RankProgram,
        pieces: Pieces,
        places: Mapping[int, Array],
    ) -> None:
        """Fills `places` with partial O and LSE, or what they alone make up."""
        q, kv = self._inputs(launch, task, pieces, Tensor.Q), self._keys(launch, task, pieces)
        lse_of = {
            _place_of(program.values[n]): n
            for n in places
            if program.values[n].tensor is Tensor.LSE
        }
        finals = self._finals_of(Pass.FORWARD, program)
        found = []
        for number in places:
            value = program.values[number]
            if value.tensor is not Tensor.O:
                continue
            pair = number, lse_of[_place_of(value)]
            if all(n in finals for n in pair):
                for n in pair:
                    _stand_in_final(n, finals[n], program, pieces)
            if value.chunk not in launch.queries:
                pieces.get(pair[0]).zero_()
                pieces.get(pair[1]).fill_(float("-inf"))
                continue
            tensors = tuple(pieces.get(n) for n in pair)
            chunk = launch.queries.index(value.chunk)
            found.append(Place(chunk, (value.head_start, value.head_stop), tensors))
        sparse.forward_set(launch.blocks, q, kv, found, self._plan.problem.scale)

    def backward(
        self,
        launch: _Launch,
        task: Compute,
        program: RankProgram,
        pieces: Pieces,
        places: Mapping[int, Array],
    ) -> None:
        """Fills `places` with partial dQ, dK and dV, or what they alone make up."""
        q, dout, lse, delta = (
            self._inputs(launch, task, pieces, tensor)
            for tensor in (Tensor.Q, Tensor.DO, Tensor.LSE, Tensor.DELTA)
        )
        kv = self._keys(launch, task, pieces)
        finals = self._finals_of(Pass.BACKWARD, program)
        for number in places:
            if number in finals:
                _stand_in_final(number, finals[number], program, pieces)
        by_place: dict[tuple[int, HeadRange], dict[Tensor, Array]] = defaultdict(dict)
        queries = []
        for number in places:
            value, place = program.values[number], pieces.get(number)
            known = launch.keys if value.tensor.by_key else launch.queries
            if value.chunk not in known:
                place.zero_()
                continue
            heads = value.head_start, value.head_stop
            chunk = known.index(value.chunk)
            if value.tensor is Tensor.DQ:
                queries.append(Place(chunk, heads, (place,)))
            else:
                by_place[chunk, heads][value.tensor] = place
        keys = []
        for (chunk, heads), some in by_place.items():
            for tensor, given in ((Tensor.DK, kv[chunk][0]), (Tensor.DV, kv[chunk][1])):
                if tensor not in some:  # nobody wants it
                    shape = given.shape[0], heads[1] - heads[0], *given.shape[2:]
                    some[tensor] = given.new_empty(shape)
            keys.append(Place(chunk, heads, (some[Tensor.DK], some[Tensor.DV])))
        sparse.backward_set(
            launch.blocks, dout, q, lse, delta, kv, queries, keys, self._plan.problem.scale
        )

    def _inputs(
        self, launch: _Launch, task: Compute, pieces: Pieces, tensor: Tensor
    ) -> list[Array]:
        return [
            pieces.assemble(task.reads, tensor, chunk, extent.heads)
            for chunk, extent in zip(launch.queries, launch.blocks.queries, strict=True)
        ]

    def _keys(self, launch: _Launch, task: Compute, pieces: Pieces) -> list[tuple[Array, Array]]:
        found = []
        for chunk, extent in zip(launch.keys, launch.blocks.keys, strict=True):
            k, v = (
                pieces.assemble(task.reads, tensor, chunk, extent.heads)
                for tensor in (Tensor.K, Tensor.V)
            )
            found.append((k, v))
        return found

    def _made(self, blocks: Sequence[Block]) -> _Launch:
        p = self._plan.problem
        spans: dict[int, HeadRange] = {}
        key_spans: dict[int, HeadRange] = {}
        for block in blocks:
            heads = block.head_start, block.head_stop
            _widen(spans, block.q_chunk, heads)
            _widen(key_spans, block.kv_chunk, p.kv_range(*heads))
        queries, keys = sorted(spans), sorted(key_spans)
        cells = tuple(
            self._cell(block, queries.index(block.q_chunk), keys.index(block.kv_chunk))
            for block in blocks
            if block.kind is not BlockKind.EMPTY
        )
        q_chunks, kv_chunks = self._plan.q_layout.chunks, self._plan.kv_layout.chunks
        made = BlockSet(
            tuple(Extent(len(q_chunks[c]), spans[c]) for c in queries),
            tuple(Extent(len(kv_chunks[c]), key_spans[c]) for c in keys),
            cells,
            p.group,
            self._device,
        )
        return _Launch(made, tuple(queries), tuple(keys))

    def _cell(self, block: Block, major: int, minor: int) -> Cell:
        heads = block.head_start, block.head_stop
        if block.kind is not BlockKind.PARTIAL:
            return Cell(major, minor, heads, block.kind, block.lo, block.hi)
        at = block.q_chunk, block.kv_chunk

        def truth(head: int, first: int, last: int, by_key: bool) -> npt.NDArray[np.bool_]:
            table = self._truth(*at, first, last, by_key)
            seen: npt.NDArray[np.bool_] = table[head if len(table) > 1 else 0]
            return seen.T if by_key else seen

        by_head = len(self._truth(*at, 0, 1, False)) > 1
        return Cell(major, minor, heads, block.kind, truth=truth, by_head=by_head)

    def _better(self, pass_: Pass, blocks: Sequence[Block]) -> bool:
        """Whether a set is faster than rows, by `rates`; rows of other kernels are not counted."""
        p = self._plan.problem
        q_chunks, kv_chunks = self._plan.q_layout.chunks, self._plan.kv_layout.chunks
        if self._always:
            return True
        if not rates.rows_serve(
            blocks, p.head_dim, p.value_dim, DTYPES[p.dtype], q_chunks, self._bands
        ):
            return True
        layout = self._plan.kv_layout
        rows: dict[int, list[rates.Call]] = defaultdict(list)
        for block in blocks:
            q, kv, heads = block.q_chunk, block.kv_chunk, block.head_stop - block.head_start
            place = layout.offsets[kv] if layout.owners[kv] == self._plan.rank else -1
            full = block.kind is BlockKind.FULL
            call = rates.Call(
                len(q_chunks[q]), len(kv_chunks[kv]), heads, block.weight, full, place,
                rates.cudnn_takes(block, q_chunks),
            )  # fmt: skip
            rows[q].append(call)
        return rates.set_seconds(pass_, rows.values(), p.head_dim) < rates.rows_seconds(
            pass_, rows.values(), p.head_dim
        )

    def _finals_of(self, pass_: Pass, program: RankProgram) -> dict[int, int]:
        if pass_ not in self._finals:
            self._finals[pass_] = finals(program)
        return self._finals[pass_]


def finals(program: RankProgram) -> dict[int, int]:
    """For each partial result that alone makes up (part of) a final one of this rank, that one.

    Nothing but the merge reads such a partial, and no other part of the merge overlaps it.
    """
    values, readers = program.values, Counter[int]()
    for task in program.tasks:
        for number in task.reads:
            readers[number] += 1
    found = {}
    for task in program.tasks:
        if not isinstance(task, Merge) or task.rank != program.rank:
            continue
        for number in task.writes:
            final = values[number]
            if final.buffer >= 0 or final.rank != program.rank:
                continue
            parts = [
                n
                for n in task.reads
                if (values[n].tensor, values[n].chunk) == (final.tensor, final.chunk)
            ]
            for n in parts:
                others = (values[m] for m in parts if m != n)
                if (
                    readers[n] == 1
                    and values[n].rank == program.rank
                    and final.contains(values[n])
                    and not any(_overlap(values[n], other) for other in others)
                ):
                    found[n] = number
    return found


def _stand_in_final(number: int, final: int, program: RankProgram, pieces: Pieces) -> None:
    place = pieces.own_place(final)
    pieces.stand(number, part_of(place, program.values[final], program.values[number]))


def _widen(spans: dict[int, HeadRange], chunk: int, heads: HeadRange) -> None:
    known = spans.get(chunk, heads)
    spans[chunk] = min(known[0], heads[0]), max(known[1], heads[1])


def _place_of(value: Value) -> tuple[int, int, int]:
    return value.chunk, value.head_start, value.head_stop


def _overlap(a: Value, b: Value) -> bool:
    return (
        max(a.row_start, b.row_start) < min(a.row_stop, b.row_stop)
        and max(a.head_start, b.head_start) < min(a.head_stop, b.head_stop)
    )  # fmt: skip
