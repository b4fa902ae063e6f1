"""Turns (mask, shape, cluster) into a `Plan`: the flow of the library, on one page."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import TypeVar

import numpy as np

from ultraattn.chunks import Ints
from ultraattn.cluster import Cluster
from ultraattn.enums import StrEnum
from ultraattn.errors import InputError
from ultraattn.masks import Grid, Lengths, Mask
from ultraattn.planning.assign import Assignment, TileOptions, assign_rows, assign_tiles
from ultraattn.planning.graph import build_program
from ultraattn.planning.layout import LayoutName, layout_by_name
from ultraattn.planning.sizes import Units
from ultraattn.planning.tiling import Effort
from ultraattn.plans.check import Pass
from ultraattn.plans.layout import Layout
from ultraattn.plans.plan import PassPlan, Place, Plan
from ultraattn.plans.problem import Problem
from ultraattn.plans.storage import canonical

PLANNER_VERSION = "1"
"""Changes whenever the same inputs would give other plan bytes."""


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
    strategy: str = "tile",
    layout: str | Layout = LayoutName.AUTO,
    kv_layout: str | Layout | None = None,
    chunks: int | None = None,
    head_groups: int | None = None,
    load_cap: float | None = None,
    strict_cap: bool = False,
    effort: str = Effort.NORMAL,
    units: str = Units.BYTES,
    pin_diagonal: bool = False,
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
        head_groups: ranges that the heads are cut into; chosen unless given.
        load_cap: the largest load over the mean (1.05 unless given); with ``units="paper"`` in
            full blocks, ``ceil(W / N)`` unless given.
        strict_cap: refuse a load cap that no assignment can keep, instead of raising it.
        effort: instant, fast, normal or best: how many steps the search takes.
        units: what sizes, bounds and proofs are stated in: bytes, or paper.
        pin_diagonal: keep diagonal blocks on their owners, for comparison with the paper's code.

    Raises:
        InputError: an argument cannot be served; says what was given, expected, and to do.
        MissingExtraError: effort normal or best without OR-Tools.
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
    options = TileOptions(
        head_groups, load_cap, strict_cap, _choice(Effort, "effort", effort),
        _choice(Units, "units", units), pin_diagonal,
    )  # fmt: skip
    nominal = _nominal(mask, q_layout, k_layout) if options.units is Units.PAPER else None
    passes = []
    for pass_ in Pass:
        made = assign(pass_, strategy, problem, grid, q_layout, k_layout, nominal, options)
        program = build_program(
            pass_, problem, q_layout, k_layout, place.node_of, made.blocks, made.ranks
        )
        passes.append(PassPlan(strategy, made.head_groups, made.bounds, made.notes, program))
    versions = (("planner", PLANNER_VERSION),)
    whole = Plan(problem, place, q_layout, k_layout, passes[0], passes[1], versions)
    whole.check()
    return whole


def assign(
    pass_: Pass,
    strategy: str,
    problem: Problem,
    grid: Grid,
    q_layout: Layout,
    kv_layout: Layout,
    nominal: tuple[Ints, int] | None,
    options: TileOptions,
) -> Assignment:
    """Blocks of one pass and their ranks, by the strategy called `strategy`."""
    if strategy == "tile":
        return assign_tiles(pass_, problem, grid, q_layout, kv_layout, nominal, options)
    if strategy == "rows":
        return assign_rows(pass_, problem, grid, q_layout, kv_layout, nominal, options)
    raise InputError(f"strategy {strategy!r}: expected tile or rows")


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


E = TypeVar("E", bound=StrEnum)


def _choice(kind: type[E], name: str, given: str) -> E:
    """A member of an enum by its value; an error lists the valid ones."""
    if given not in list(kind):
        raise InputError(f"{name} {given!r}: expected one of {', '.join(kind)}")
    return kind(given)


def _nominal(mask: Mask, q_layout: Layout, kv_layout: Layout) -> tuple[Ints, int]:
    names = {q_layout.name, kv_layout.name}
    if not names <= {"contiguous", "zigzag", "remapped"}:
        raise InputError(
            f"units 'paper' with layout {q_layout.name!r}: its weights are of contiguous chunks; "
            "use layout contiguous, zigzag or remapped, or units 'bytes'"
        )
    remapped = q_layout.name == "remapped"
    return mask.nominal(len(q_layout.chunks), len(kv_layout.chunks), remapped=remapped)


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
