"""Turns (mask, shape, cluster) into a `Plan`: the flow of the library, on one page."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

from ultraattn.cluster import Cluster
from ultraattn.enums import StrEnum
from ultraattn.errors import InputError
from ultraattn.masks import Lengths, Mask
from ultraattn.planning import keeping, layers
from ultraattn.planning.assign import TileOptions, assign_tiles
from ultraattn.planning.choose import best_passes
from ultraattn.planning.collecting import no_collecting
from ultraattn.planning.layout import LayoutName
from ultraattn.planning.layout_search import searched
from ultraattn.planning.passes import Where, plan_pass
from ultraattn.planning.setting import (
    Setting,
    Shape,
    at_level_degree,
    default_layout,
    setting,
    uneven_rows,
    with_less_to_fetch,
)
from ultraattn.planning.sizes import Units
from ultraattn.planning.tiling import Effort
from ultraattn.plans.check import Pass
from ultraattn.plans.layout import Layout
from ultraattn.plans.plan import Plan
from ultraattn.strategies import NAMES as RIVALS
from ultraattn.strategies import by_name

MOST_RANKS_MIRRORED = 16
"""Tiles are not tried over zigzag beyond so many ranks: its chunks cost more than they win."""

Known = dict[tuple[Layout, Layout], Setting]
"""Settings by the layouts of queries and keys."""

PLANNER_VERSION = "2"
"""Changes whenever the same inputs would give other plan bytes."""


@no_collecting()
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
    cluster: Cluster | str | None = None,
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
    keep_received: bool = False,
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
        cluster: where it runs: a `Cluster`, or the name of a preset or file, resized to `ranks`
            where these are given; one CPU node of `ranks` unless given.
        ranks: how many, where no `Cluster` says.
        strategy: how blocks get their ranks: tile (this system), rows, a rival's name
            (`ultraattn.strategies.NAMES`), or auto, the best of all in simulated time.
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
        keep_received: let backward read again the queries, keys and values that a rank received in
            forward, where that is faster: less traffic, for memory that is held between the passes
            (`Plan.kept_bytes`, one batch entry and one layer).

    Raises:
        InputError: an argument cannot be served; says what was given, expected, and to do.
        MissingExtraError: effort normal or best without OR-Tools.
    """
    cluster = _cluster(cluster, ranks)
    kv_seqlen = seqlen if kv_seqlen is None else kv_seqlen
    shape = Shape(
        seqlen,
        kv_seqlen,
        heads,
        heads if kv_heads is None else kv_heads,
        head_dim,
        head_dim if value_dim is None else value_dim,
        dtype,
        float(head_dim**-0.5 if scale is None else scale),
    )
    mask.check(Lengths(seqlen, kv_seqlen), heads)
    options = TileOptions(
        head_groups, load_cap, strict_cap, _choice(Effort, "effort", effort),
        _choice(Units, "units", units), pin_diagonal,
    )  # fmt: skip
    given = (layout, kv_layout, chunks, options)
    known: Known = {}
    candidates = settings(mask, shape, cluster, strategy, *given, known)
    where = Where.of(cluster)
    if strategy == "auto":
        tile = most_promising(settings(mask, shape, cluster, "tile", *given, known), options)
        choice = best_passes(candidates, where, options, tile)
        made, forward, backward = choice.made, choice.forward, choice.backward
    elif strategy == "tile" and layers.serves(where.place, where.costs, options):
        made, forward, backward = layers.layered_tiles(candidates, where, options)
    else:
        made = most_promising(candidates, options)
        forward, backward = (plan_pass(pass_, strategy, made, where, options) for pass_ in Pass)
    if keep_received:
        backward = keeping.keep_received(made, where, forward, backward, options.effort)
    whole = Plan(
        made.problem,
        where.place,
        made.q_layout,
        made.kv_layout,
        forward,
        backward,
        (("planner", PLANNER_VERSION),),
    )
    if options.effort is not Effort.INSTANT:
        whole.check()  # An instant plan is checked when it is saved or run.
    return whole


def settings(
    mask: Mask,
    shape: Shape,
    cluster: Cluster,
    strategy: str,
    layout: str | Layout,
    kv_layout: str | Layout | None,
    chunks: int | None,
    options: TileOptions,
    known: Known | None = None,
) -> list[Setting]:
    """The layouts worth comparing, with the mask's grid over each; the default first.

    A layout that was asked for is the only one. For `auto`, efforts normal and best compare the
    mask's own remap (or contiguous chunks), zigzag, and what swaps of owners find; the strategy
    `auto` also finer chunks where whole ones move much that nobody sees, and every rival's own
    layout. A rival keeps to the layout that its authors use. Settings that are `known` are taken,
    and new ones added there: what a setting holds is made once.
    """
    known = {} if known is None else known
    if layout == LayoutName.AUTO and strategy.partition(":")[0] in RIVALS:
        layout = by_name(strategy).layout

    def make(name: str | Layout, count: int | None) -> Setting:
        q = _layout(name, mask, shape.q_len, cluster, count)
        if kv_layout is None and shape.kv_len == shape.q_len:
            return over(q, q)
        keys = kv_layout or (name if isinstance(name, str) else LayoutName.CONTIGUOUS)
        return over(q, _layout(keys, mask, shape.kv_len, cluster, count))

    def over(q: Layout, kv: Layout) -> Setting:
        if (q, kv) not in known:
            known[q, kv] = setting(mask, shape, q, kv)
        return known[q, kv]

    def at(name: str | Layout) -> Setting:
        if chunks is not None or strategy not in ("tile", "auto") or isinstance(name, Layout):
            return make(name, chunks)
        return at_level_degree(lambda count: make(name, count), options.eta)

    if strategy == "auto" and options.effort is Effort.INSTANT and chunks is None:
        # One layout is all that the time allows: mirrored pieces where rows would be uneven.
        first = make(layout, None)
        if layout == LayoutName.AUTO and uneven_rows(first) > options.eta:
            first = make(LayoutName.ZIGZAG, None)
        return [first]
    found = [at(layout)]
    if isinstance(layout, Layout):
        return found
    if strategy == "auto" and chunks is None:
        found.append(make(layout, None))
        found += with_less_to_fetch(lambda count: make(layout, count), found[-1])
    if layout != LayoutName.AUTO or strategy not in ("tile", "auto"):
        return _apart(found)
    if strategy == "auto" and chunks is None:
        # What rivals keep to: a rival as its authors run it is never faster than the choice.
        names = {rival.layout for rival in RIVALS.values()}
        if options.effort is Effort.INSTANT:
            names -= {LayoutName.STRIPED}
        found += [make(name, None) for name in sorted(names)]
    if options.effort in (Effort.NORMAL, Effort.BEST) and shape.q_len == shape.kv_len:
        first = found[0]
        ranks = cluster.ranks
        if first.q_layout.name == LayoutName.CONTIGUOUS:
            few = strategy == "auto" or ranks <= MOST_RANKS_MIRRORED or cluster.nodes > 1
            if few and (chunks is None or chunks % (2 * ranks) == 0):
                found.append(at(LayoutName.ZIGZAG))
            if strategy == "auto" and chunks is not None and chunks % ranks == 0:
                found.append(make(LayoutName.STRIPED, chunks))
            better = searched(first.q_layout, first.grid.kinds[0].any(axis=0))
            if better is not None:
                found.append(over(better, better))
    return _apart(found)


def _apart(found: list[Setting]) -> list[Setting]:
    """Without settings whose chunks have the owners of an earlier one."""
    out: list[Setting] = []
    seen = set()
    for made in found:
        if made.places not in seen:
            seen.add(made.places)
            out.append(made)
    return out


def most_promising(candidates: list[Setting], options: TileOptions) -> Setting:
    """The setting whose quick assignments load the busiest link least, both passes together."""
    quick = dataclasses.replace(options, effort=Effort.INSTANT)

    def cost(made: Setting) -> float:
        return sum(assign_tiles(pass_, made, quick).bounds.max_volume for pass_ in Pass)

    return min(candidates, key=cost) if len(candidates) > 1 else candidates[0]


E = TypeVar("E", bound=StrEnum)


def _choice(kind: type[E], name: str, given: str) -> E:
    """A member of an enum by its value; an error lists the valid ones."""
    if given not in list(kind):
        raise InputError(f"{name} {given!r}: expected one of {', '.join(kind)}")
    return kind(given)


def _cluster(cluster: Cluster | str | None, ranks: int | None) -> Cluster:
    if isinstance(cluster, str):
        named = Cluster.load(cluster)
        return named if ranks is None else named.with_ranks(ranks)
    if cluster is None:
        return Cluster.load("cpu").resize(gpus_per_node=1 if ranks is None else ranks)
    if ranks is not None and ranks != cluster.ranks:
        raise InputError(
            f"ranks {ranks} with a cluster of {cluster.nodes} x {cluster.gpus_per_node} ranks; "
            "leave ranks out, or resize the cluster"
        )
    return cluster


def _layout(
    layout: str | Layout, mask: Mask, length: int, cluster: Cluster, chunks: int | None
) -> Layout:
    if isinstance(layout, Layout):
        if (layout.length, layout.ranks) != (length, cluster.ranks):
            raise InputError(
                f"layout for {layout.length} tokens over {layout.ranks} ranks, the plan is for "
                f"{length} tokens over {cluster.ranks}; make a layout for these"
            )
        return layout
    return default_layout(layout, mask, length, cluster.ranks, chunks, cluster.align)
