"""Turns blocks into a program that gathers all keys and values, and scatters their gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from ultraattn.plans.check import Pass
from ultraattn.plans.layout import Layout
from ultraattn.plans.problem import Problem
from ultraattn.plans.program import Block, CollectiveOp, Program, Value
from ultraattn.strategies.draft import END, START, WORK, Draft, Held


def allgather(
    pass_: Pass,
    problem: Problem,
    q_layout: Layout,
    kv_layout: Layout,
    nodes: Sequence[int],
    blocks: Sequence[Block],
) -> Program:
    """Keys and values to all ranks, one launch a rank, gradients of keys back by reduce-scatter.

    A rank without a block for a key chunk sends zeros, as the originals do.
    """
    draft = Draft(pass_, problem, q_layout, kv_layout, nodes, blocks)
    everyone = range(draft.ranks)
    held: dict[int, Held] = {rank: {} for rank in everyone}
    reads, writes = [], []
    for chunk in draft.chunks_of(everyone, by_key=True):
        for tensor in draft.moving(by_key=True):
            own = draft.own(tensor, chunk)
            for rank in everyone:
                held[rank][tensor, chunk] = own
                if rank != kv_layout.owners[chunk]:
                    copy = held[rank][tensor, chunk] = draft.builder.copy(own, rank)
                    writes.append(copy)
            reads.append(own)
    if writes:
        draft.builder.collective(CollectiveOp.ALL_GATHER, reads, writes, (START, 1))
    tiles: dict[int, list[int]] = defaultdict(list)
    for number, block in enumerate(blocks):
        tiles[q_layout.owners[block.q_chunk]].append(number)
    every_head = (0, problem.heads)
    gradients: dict[int, Held] = {rank: {} for rank in everyone}
    for rank in sorted(tiles):
        for chunk in draft.chunks_of([rank], by_key=False):
            for tensor in draft.moving(by_key=False):
                held[rank][tensor, chunk] = draft.own(tensor, chunk)
        out = draft.launch(rank, tiles[rank], held[rank], every_head, (WORK, 0, rank))
        draft.arrived({where: n for where, n in out.items() if not where[0].by_key})
        gradients[rank] = {where: n for where, n in out.items() if where[0].by_key}
    if pass_ is Pass.FORWARD or draft.ranks == 1:
        for part in gradients.values():
            draft.arrived(part)
        return draft.finish()
    return draft.finish(_reduce_scatter(draft, gradients))


def _reduce_scatter(draft: Draft, gradients: dict[int, Held]) -> list[int]:
    """The results of all key chunks at their owners."""
    wanted = [
        (tensor, chunk)
        for chunk in draft.chunks_of(range(draft.ranks), by_key=True)
        for tensor in draft.results(by_key=True)
    ]
    heads = (0, draft.problem.heads)
    for rank, held in gradients.items():
        missing = [where for where in wanted if where not in held]
        held.update(draft.zeros(rank, missing, heads, (WORK, 1, rank), wide=False))
    writes = []
    for tensor, chunk in wanted:
        parts = [gradients[rank][tensor, chunk] for rank in range(draft.ranks)]
        cover = sorted(b for part in parts for b in draft.builder.values[part].cover)
        writes.append(
            draft.builder.value(
                Value(
                    tensor, chunk, 0, draft.rows(tensor, chunk), 0, draft.problem.kv_heads,
                    draft.kv_layout.owners[chunk], cover=tuple(cover),
                )
            )
        )  # fmt: skip
    if writes:
        reads = [n for held in gradients.values() for n in held.values()]
        draft.builder.collective(CollectiveOp.REDUCE_SCATTER, reads, writes, (END, 0))
    return writes
