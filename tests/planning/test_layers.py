"""Planning in layers over nodes: blocks whole, loads level, never slower than one level."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ultraattn as ua
from ultraattn import masks
from ultraattn.planning import layers
from ultraattn.planning.assign import TileOptions
from ultraattn.planning.passes import Where, plan_pass
from ultraattn.planning.plan import settings as settings_of
from ultraattn.planning.routes import Nodes
from ultraattn.planning.setting import Shape
from ultraattn.planning.tiling import Effort
from ultraattn.planning.two_levels import Levels, sketches
from ultraattn.plans import Pass

FAST = TileOptions(effort=Effort.FAST)
MASKS = {
    "full": masks.full(),
    "causal": masks.causal(),
    "window": masks.sliding_window(2048),
    "document": masks.document([9000, 4000, 2500, 884]),
    "global_local": masks.global_local(grid=16, globals=1, locals=1),
}


def case(mask, nodes=2, per_node=4, preset="h200", tokens=16384, heads=(8, 2)):
    cluster = ua.Cluster.load(preset).resize(nodes, per_node)
    shape = Shape(tokens, tokens, *heads, 128, 128, "bfloat16", 128**-0.5)
    made = settings_of(MASKS[mask], shape, cluster, "tile", "zigzag", None, None, FAST)
    return made, Where.of(cluster)


@settings(deadline=None, derandomize=True, max_examples=12)
@given(
    mask=st.sampled_from(sorted(MASKS)),
    nodes=st.sampled_from([(2, 2), (2, 4), (4, 2)]),
    pass_=st.sampled_from(list(Pass)),
)
def test_every_sketch_gives_every_block_a_rank_of_its_node(mask, nodes, pass_):
    (made, *_), where = case(mask, *nodes)
    tiling = layers._sized(pass_, made, FAST, 1).tiling
    levels = Levels(pass_, made, Nodes.of(where.place.node_of), tiling)
    for sketch in sketches(levels, where.costs, Effort.FAST, [1, 2, 4, 8], 6):
        ranks = levels.ranks(sketch.start, sketch.mesh)
        shown = np.broadcast_to(tiling.weight > 0, ranks.shape)
        assert ((ranks >= 0) == shown).all()
        inside = sketch.mesh[0]
        node = np.repeat(sketch.start.node, inside, axis=0)
        assert (ranks[shown] // nodes[1] == node[shown]).all()
        assert sketch.seconds > 0


@pytest.mark.parametrize("mask", sorted(MASKS))
def test_what_is_built_is_sound_and_never_slower_than_one_level(mask):
    plan = ua.plan(
        MASKS[mask], seqlen=16384, heads=8, kv_heads=2, head_dim=128, effort="fast",
        cluster=ua.Cluster.load("h200").resize(2, 4), layout="zigzag",
    )  # fmt: skip
    plan.check()
    made, where = case(mask)
    for pass_ in Pass:
        flat = plan_pass(pass_, "tile", made[0], where, FAST)
        assert plan.pass_plan(pass_).predicted_ns <= flat.predicted_ns


def test_layers_cross_nodes_less_than_one_level_and_are_faster():
    plan = ua.plan(
        masks.causal(), seqlen=65536, heads=8, kv_heads=8, head_dim=128, effort="fast",
        cluster=ua.Cluster.load("h100").resize(2, 4), layout="zigzag",
    )  # fmt: skip
    (made,) = settings_of(
        masks.causal(), Shape(65536, 65536, 8, 8, 128, 128, "bfloat16", 128**-0.5),
        ua.Cluster.load("h100").resize(2, 4), "tile", "zigzag", None, None, FAST,
    )  # fmt: skip
    where = Where.of(ua.Cluster.load("h100").resize(2, 4))
    for pass_ in Pass:
        flat = plan_pass(pass_, "tile", made, where, FAST)
        whole = dataclasses.replace(plan, **{str(pass_): flat})
        assert plan.pass_plan(pass_).predicted_ns < 0.95 * flat.predicted_ns
        crossing = [p.account(pass_).sent_between_nodes.sum() for p in (plan, whole)]
        assert crossing[0] < crossing[1]


def test_auto_over_nodes_says_what_it_planned_in_layers_and_beats_every_rival():
    cluster = ua.Cluster.load("h100").resize(2, 4)
    given = {"seqlen": 65536, "heads": 8, "head_dim": 128, "cluster": cluster, "effort": "fast"}
    plan = ua.plan(masks.sliding_window(4096), strategy="auto", **given)
    total = plan.forward.predicted_ns + plan.backward.predicted_ns
    for name in ("ring", "allgather", "heads", "double_ring", "mesh"):
        rival = ua.plan(masks.sliding_window(4096), strategy=name, **given)
        assert total < rival.forward.predicted_ns + rival.backward.predicted_ns, name
    notes = [note for part in (plan.forward, plan.backward) for note in part.notes]
    assert any(note.startswith("assignment: in layers") for note in notes)


def test_the_choice_compares_candidates_as_they_are_arranged(monkeypatch):
    def time_ns(strategy):
        made = ua.plan(
            masks.full(), seqlen=8192, heads=32, head_dim=128, strategy=strategy, effort="fast",
            cluster=ua.Cluster.load("h100").resize(2, 4),
        )  # fmt: skip
        return sum(made.pass_plan(pass_).predicted_ns for pass_ in Pass)

    chosen, tile = time_ns("auto"), time_ns("tile")
    # By arrival the backward pass is faster in layers, in order it is not.
    monkeypatch.setattr(layers, "serves", lambda *_: False)
    assert chosen <= min(tile, time_ns("auto"))


def test_a_load_cap_is_kept():
    plan = ua.plan(
        masks.document([9000, 4000, 2500, 884]), seqlen=16384, heads=8, head_dim=128,
        cluster=ua.Cluster.load("h100").resize(2, 4), effort="fast", load_cap=1.1,
    )  # fmt: skip
    assert plan.forward_account.load_over_mean <= 1.1
    assert plan.backward_account.load_over_mean <= 1.1


def test_plans_in_layers_are_the_same_every_time():
    made = [
        ua.plan(
            masks.causal(), seqlen=16384, heads=8, head_dim=128, effort="fast",
            cluster=ua.Cluster.load("a800").resize(2, 4),
        )
        for _ in range(2)
    ]  # fmt: skip
    assert made[0].digest == made[1].digest
    assert any("in layers" in note for note in made[0].backward.notes)


def test_one_node_is_not_planned_in_layers():
    assert not layers.serves(Where.of(ua.Cluster.load("h100")).place, None, FAST)
    cluster = ua.Cluster.load("h100").resize(1, 8)
    assert not layers.serves(Where.of(cluster).place, cluster.costs, FAST)
    cluster = ua.Cluster.load("h100").resize(2, 8)
    assert layers.serves(Where.of(cluster).place, cluster.costs, FAST)
