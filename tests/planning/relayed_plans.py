"""Turns a mask, a layout and an assignment into a whole plan over gateways, and one without."""

from __future__ import annotations

import dataclasses
import random

import ultraattn as ua
from ultraattn.masks import Mask
from ultraattn.planning.blocks import blocks_of
from ultraattn.planning.graph import build_program
from ultraattn.planning.relays import How, build_relayed
from ultraattn.plans import Bounds, Pass, PassPlan, Plan

LENGTH = 97
MASKS: dict[str, Mask] = {
    "full": ua.masks.full(),
    "causal": ua.masks.causal(),
    "window": ua.masks.sliding_window(31),
    "narrow": ua.masks.sliding_window(5),
    "document": ua.masks.document([40, 30, 27]),
    "global_local": ua.masks.global_local(grid=16, globals=1, locals=1),
    "star": ua.masks.star(grid=4),
}
ASSIGNMENTS = ("rows", "heads", "nodes", "any")
HOWS = {
    "waves": How(),
    "parts": How(parts=2),
    "stripes": How(message=1),
    "grouped": How(grouped=True),
    "together": How(together=True, message=1),
}


def relayed_plan(
    mask: str,
    *,
    nodes: int = 2,
    per_node: int = 2,
    layout: str = "zigzag",
    heads: tuple[int, int] = (4, 2),
    assignment: str = "any",
    how: How | None = None,
    dtype: str = "float64",
    seed: int = 0,
) -> Plan:
    """Without `how`, by direct transfers."""
    base = ua.plan(
        MASKS[mask],
        seqlen=LENGTH,
        heads=heads[0],
        kv_heads=heads[1],
        head_dim=8,
        value_dim=6,
        dtype=dtype,
        cluster=ua.Cluster.load("cpu").resize(nodes, per_node),
        layout=layout,
        strategy="rows",
    )
    grid = MASKS[mask].grid(base.q_layout.chunks, base.kv_layout.chunks, heads=heads[0])
    groups = 1 if assignment == "rows" else 2
    blocks = blocks_of(grid, heads[0], groups)
    ranks = _ranks(assignment, base, blocks, seed)
    given = (base.problem, base.q_layout, base.kv_layout, base.place.node_of, blocks, ranks)
    programs = {
        pass_: build_program(pass_, *given) if how is None else build_relayed(pass_, *given, how)
        for pass_ in Pass
    }
    parts = {
        pass_: PassPlan("tile", groups, Bounds(0.0, 0.0, False), (), program)
        for pass_, program in programs.items()
    }
    return dataclasses.replace(base, forward=parts[Pass.FORWARD], backward=parts[Pass.BACKWARD])


def _ranks(assignment: str, base: Plan, blocks: list, seed: int) -> list[int]:
    q, kv = base.q_layout.owners, base.kv_layout.owners
    per, count, heads = base.place.gpus_per_node, base.place.nodes, base.problem.heads
    drawn = random.Random(seed)
    if assignment == "rows":
        return [q[b.q_chunk] for b in blocks]
    if assignment == "heads":
        return [q[b.q_chunk] // per * per + b.head_start * per // heads for b in blocks]
    if assignment == "nodes":
        return [
            (q[b.q_chunk] + kv[b.kv_chunk]) // per % count * per + kv[b.kv_chunk] % per
            for b in blocks
        ]
    return [drawn.randrange(base.ranks) for _ in blocks]
