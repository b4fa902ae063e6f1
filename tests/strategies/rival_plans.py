"""Turns a rival's name, a mask and a shape into a whole plan."""

from __future__ import annotations

import dataclasses

import ultraattn as ua
from ultraattn.masks import Mask
from ultraattn.planning.blocks import blocks_of
from ultraattn.plans import Bounds, Pass, PassPlan, Plan
from ultraattn.strategies import build_pass, by_name


def rival_plan(
    name: str,
    mask: Mask,
    *,
    seqlen: int,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    value_dim: int = 8,
    dtype: str = "float64",
    nodes: int = 1,
    per_node: int = 4,
    layout: str | None = None,
    chunks: int | None = None,
    kv_seqlen: int | None = None,
) -> Plan:
    strategy = by_name(name)
    base = ua.plan(
        mask,
        seqlen=seqlen,
        kv_seqlen=kv_seqlen,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        dtype=dtype,
        cluster=ua.Cluster.load("cpu").resize(nodes, per_node),
        layout=layout or strategy.layout,
        chunks=chunks,
        strategy="rows",
    )
    grid = mask.grid(base.q_layout.chunks, base.kv_layout.chunks, heads=heads)
    groups = strategy.head_groups(base.problem, base.ranks)
    blocks = blocks_of(grid, heads, groups)
    passes = {
        pass_: PassPlan(
            strategy.label,
            groups,
            Bounds(0.0, 0.0, False),
            (),
            build_pass(
                name, pass_, base.problem, base.q_layout, base.kv_layout, base.place, blocks
            ),
        )
        for pass_ in Pass
    }
    return dataclasses.replace(base, forward=passes[Pass.FORWARD], backward=passes[Pass.BACKWARD])
