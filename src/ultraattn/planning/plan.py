"""Turns (mask, shape, cluster) into a `Plan`: the flow of the library, on one page."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass

import numpy as np

from ultraattn.cluster import Cluster
from ultraattn.errors import InputError
from ultraattn.masks import Grid, Lengths, Mask
from ultraattn.planning.blocks import blocks_of
from ultraattn.planning.graph import build_program
from ultraattn.planning.layout import LayoutName, layout_by_name
from ultraattn.plans.account import account
from ultraattn.plans.check import Pass
from ultraattn.plans.layout import Layout
from ultraattn.plans.plan import Bounds, PassPlan, Place, Plan
from ultraattn.plans.problem import Problem
from ultraattn.plans.storage import canonical
from ultraattn.strategies import rows

PLANNER_VERSION = "1"
"""Changes whenever the same inputs would give other plan bytes."""


@dataclass(frozen=True)
class Options:
    """How to plan, with defaults that suit most callers."""

    strategy: str = "rows"
    head_groups: int = 1


def plan(
    mask: Mask,
    *,
    seqlen: int,
    kv_seqlen: int | None = None,
    heads: int,
    kv_heads: int | None = None,
    head_dim: int,
    value_dim: int | None = None,
    dtype: str = "bfloat16",
    scale: float | None = None,
    cluster: Cluster | None = None,
    ranks: int | None = None,
    strategy: str = "rows",
    layout: str | Layout = LayoutName.AUTO,
    kv_layout: str | Layout | None = None,
    chunks: int | None = None,
    head_groups: int = 1,
) -> Plan:
    """Plans one attention, forward and backward.

    Args:
        mask: what each query sees (`ultraattn.masks`).
        seqlen: queries, in tokens of the whole sequence.
        kv_seqlen: keys; as many as queries unless given.
        heads: query heads.
        kv_heads: key/value heads, a divisor of `heads`; as many as `heads` unless given.
        head_dim: elements of a query or key.
        value_dim: elements of a value; `head_dim` unless given.
        dtype: float64, float32, bfloat16 or float16.
        scale: factor of the scores; ``head_dim ** -0.5`` unless given.
        cluster: where it runs; one CPU node of `ranks` unless given.
        ranks: ranks of one node, where no cluster is given.
        strategy: how blocks get their ranks.
        layout: a layout's name, or a `Layout` (of another plan, say).
        kv_layout: the same for keys; the queries' unless given.
        chunks: chunks of the sequence (the partition degree); the layout's least unless given.
        head_groups: ranges that the heads are cut into.

    Raises:
        InputError: an argument cannot be served; says what was given, expected, and to do.
    """
    cluster = _cluster(cluster, ranks)
    kv_seqlen = seqlen if kv_seqlen is None else kv_seqlen
    lengths = Lengths(seqlen, kv_seqlen)
    mask.check(lengths, heads)
    q_layout = _layout(layout, mask, seqlen, cluster, chunks)
    same = kv_layout is None and kv_seqlen == seqlen
    k_layout = (
        q_layout
        if same
        else _layout(kv_layout or _name_of(layout), mask, kv_seqlen, cluster, chunks)
    )
    grid = mask.grid(q_layout.chunks, k_layout.chunks, heads=heads)
    problem = Problem(
        mask=canonical(mask.spec()) if mask.savable else "",
        mask_label=str(mask),
        mask_digest=grid_digest(grid),
        visible_pairs=_pairs(grid, heads),
        q_len=seqlen,
        kv_len=kv_seqlen,
        heads=heads,
        kv_heads=heads if kv_heads is None else kv_heads,
        head_dim=head_dim,
        value_dim=head_dim if value_dim is None else value_dim,
        dtype=dtype,
        scale=float(head_dim**-0.5 if scale is None else scale),
    )
    place = Place(cluster.name, cluster.nodes, cluster.gpus_per_node)
    options = Options(strategy, head_groups)
    forward, backward = (
        plan_pass(pass_, problem, grid, q_layout, k_layout, place, options) for pass_ in Pass
    )
    made = Plan(
        problem, place, q_layout, k_layout, forward, backward, (("planner", PLANNER_VERSION),)
    )
    made.check()
    return made


def plan_pass(
    pass_: Pass,
    problem: Problem,
    grid: Grid,
    q_layout: Layout,
    kv_layout: Layout,
    place: Place,
    options: Options,
) -> PassPlan:
    """Blocks, their ranks, and the program of one pass."""
    blocks = blocks_of(grid, problem.heads, options.head_groups)
    if options.strategy != "rows":
        raise InputError(f"strategy {options.strategy!r}: expected rows")
    assigned = rows(blocks, q_layout)
    program = build_program(pass_, problem, q_layout, kv_layout, place.node_of, blocks, assigned)
    volume = account(problem, program, place.node_of).max_volume
    bounds = Bounds(float(volume), 0.0, proved=volume == 0)
    return PassPlan(options.strategy, options.head_groups, bounds, (), program)


def grid_digest(grid: Grid) -> str:
    """SHA-256 over the chunks, kinds, bands and weights of a grid."""
    digest = hashlib.sha256()
    for chunks in (grid.q_chunks, grid.kv_chunks):
        digest.update(canonical([[c.start, c.stop, c.step] for c in chunks]).encode())
    for field in ("kinds", "lo", "hi", "weights"):
        array = np.ascontiguousarray(getattr(grid, field), dtype="<i8")
        digest.update(canonical(list(array.shape)).encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _pairs(grid: Grid, heads: int) -> int:
    total = int(grid.weights[0].sum())
    return total * heads if grid.heads == 1 else total


def _cluster(cluster: Cluster | None, ranks: int | None) -> Cluster:
    if cluster is None:
        return Cluster.load("cpu").resize(gpus_per_node=1 if ranks is None else ranks)
    if ranks is not None and ranks != cluster.ranks:
        raise InputError(
            f"ranks {ranks} with a cluster of {cluster.nodes} x {cluster.gpus_per_node} ranks; "
            "leave ranks out, or resize the cluster"
        )
    return cluster


def _name_of(layout: str | Layout) -> str:
    return layout if isinstance(layout, str) else LayoutName.CONTIGUOUS


def _layout(
    layout: str | Layout, mask: Mask, length: int, cluster: Cluster, chunks: int | None
) -> Layout:
    if isinstance(layout, Layout):
        if (layout.length, layout.ranks) != (length, cluster.ranks):
            raise InputError(
                f"layout for {layout.length} tokens over {layout.ranks} ranks, the plan is for "
                f"{length} tokens over {cluster.ranks}; make a layout for these"
            )
        return dataclasses.replace(layout)
    order = mask.cell_order()
    name = layout
    if name == LayoutName.AUTO:
        name = LayoutName.CONTIGUOUS if order is None else LayoutName.REMAPPED
    return layout_by_name(
        name, length, cluster.ranks, order=order, chunks=chunks, align=cluster.align
    )
