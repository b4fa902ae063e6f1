"""Makes a backward pass that reads again what its ranks received in forward, instead of sending it.

Queries, keys and values travel in both passes, often to the same ranks:

    forward                            backward                          backward, keeping
    k,v of chunk 0 ──> rank 1          k,v of chunk 0 ──> rank 1         rank 1 has k,v
    o,lse of chunk 2 <── rank 1        dk,dv of chunk 0 <── rank 1       dk,dv of chunk 0 <── rank 1

That costs the memory in which they stand between the passes (issue "Kernel-level tiling and the
schedule": what backward can keep from forward).
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict

from ultraattn.planning.arrange import Arranger, fastest
from ultraattn.planning.graph import Held, build_program
from ultraattn.planning.passes import OWN, Where
from ultraattn.planning.setting import Setting
from ultraattn.planning.tiling import Effort
from ultraattn.plans.account import account
from ultraattn.plans.head_ranges import HeadRange
from ultraattn.plans.kept import received
from ultraattn.plans.layout import Layout
from ultraattn.plans.passes import Pass
from ultraattn.plans.plan import Bounds, PassPlan
from ultraattn.plans.program import Program
from ultraattn.plans.tensors import Tensor


def keep_received(
    made: Setting, where: Where, forward: PassPlan, backward: PassPlan, effort: Effort
) -> PassPlan:
    """The backward pass, keeping from forward where that is faster; else `backward` as it is.

    Compared are `backward`, and two passes that keep: with its blocks where they are, and with
    every block on the rank that has it in forward, where queries, keys and values need not move at
    all. Simulated time decides; the bytes of the busiest rank where that of `backward` is unknown.
    """
    held = held_after(forward.program, made.q_layout, made.kv_layout)
    costs = where.costs if backward.predicted_ns is not None else None
    where = dataclasses.replace(where, costs=costs)
    best, best_cost = backward, _cost(made, where, backward)
    for source in (backward, forward):
        if not len(source.program.blocks.kind):
            continue
        found = _pass(made, where, source, held, effort)
        cost = _cost(made, where, found)
        if cost < best_cost:
            best, best_cost = found, cost
    if best is backward:
        note = "keeps nothing from forward: no pass that does is faster"
        return dataclasses.replace(backward, notes=(*backward.notes, note))
    return best


def held_after(forward: Program, q_layout: Layout, kv_layout: Layout) -> Held:
    """What each rank received in forward, all rows: heads by (rank, tensor, chunk)."""
    values = forward.value_views
    found: dict[tuple[int, Tensor, int], list[HeadRange]] = defaultdict(list)
    for key, numbers in received(forward, q_layout, kv_layout).items():
        _, tensor, chunk = key
        layout = kv_layout if tensor.by_key else q_layout
        rows = len(layout.chunks[chunk])
        for number in numbers:
            value = values[number]
            if value.rows == rows:
                found[key].append((value.head_start, value.head_stop))
    return found


def _pass(made: Setting, where: Where, source: PassPlan, held: Held, effort: Effort) -> PassPlan:
    """Backward with the blocks and ranks of `source`, in its fastest arrangement."""
    blocks, ranks = source.program.block_views, source.program.rank_of_block.tolist()
    given = Pass.BACKWARD, made.problem, made.q_layout, made.kv_layout, where.place.node_of
    program = build_program(*given, blocks, ranks, held)
    time: int | None = None
    notes: tuple[str, ...] = ()
    if where.costs is not None:
        arranger = Arranger(*given, where.costs, held)
        quick = arranger.quick(program, effort)
        best = fastest([*quick, *arranger.deep(blocks, ranks, quick, effort)])
        program, time, notes = best.program, best.time_ns, best.notes
    volume = float(account(made.problem, program, where.place.node_of).max_volume)
    return PassPlan(
        source.strategy if source.strategy in OWN else "tile",
        source.head_groups,
        Bounds(volume, 0.0, volume == 0),
        notes,
        program,
        time,
    )


def _cost(made: Setting, where: Where, part: PassPlan) -> float:
    if part.predicted_ns is not None:
        return float(part.predicted_ns)
    return float(account(made.problem, part.program, where.place.node_of).max_volume)
