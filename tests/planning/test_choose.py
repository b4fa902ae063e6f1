"""`strategy="auto"`: never slower than a rival as its authors run it, and says what it compared."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

import ultraattn as ua
from ultraattn import masks
from ultraattn.cluster import Cluster
from ultraattn.errors import InputError
from ultraattn.masks import Mask
from ultraattn.planning import choose
from ultraattn.planning.floors import Columns, Floors
from ultraattn.planning.passes import Where, rival_pass, timed
from ultraattn.planning.setting import (
    Setting,
    Shape,
    default_layout,
    setting,
    with_less_to_fetch,
)
from ultraattn.plans import Pass, Plan
from ultraattn.strategies import NAMES, by_name

MASKS: dict[str, Mask] = {
    "causal": masks.causal(),
    "window": masks.sliding_window(700),
    "document": masks.document([1500, 800, 1796]),
    "star": masks.star(),
    "global_local": masks.global_local(),
}
PLACES = {"one": ("h100", 1, 4), "two": ("h200", 2, 2), "odd": ("a800", 1, 3), "cpu": ("cpu", 1, 2)}
CELLS = list(itertools.product(MASKS, PLACES))


def cluster_of(place: str) -> Cluster:
    name, nodes, each = PLACES[place]
    return Cluster.load(name).resize(nodes, each)


def planned(mask: Mask, cluster: Cluster, strategy: str, effort: str = "normal") -> Plan:
    return ua.plan(
        mask, seqlen=4096, heads=8, kv_heads=2, head_dim=64, cluster=cluster,
        dtype="float32" if cluster.name == "cpu" else "bfloat16", strategy=strategy, effort=effort,
    )  # fmt: skip


def time_ns(plan: Plan) -> int:
    times = [plan.pass_plan(pass_).predicted_ns for pass_ in Pass]
    assert None not in times
    return sum(t for t in times if t is not None)


@pytest.mark.parametrize(("mask", "place"), CELLS)
def test_the_choice_is_never_slower_than_any_rival_in_its_own_layout(mask: str, place: str) -> None:
    cluster = cluster_of(place)
    chosen = planned(MASKS[mask], cluster, "auto", "fast")
    for rival in NAMES.values():
        for variant in rival.variants(chosen.problem, cluster.ranks):
            other = planned(MASKS[mask], cluster, variant.label, "instant")
            assert time_ns(chosen) <= time_ns(other), variant.label


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize(("mask", "place"), CELLS[::3])
def test_no_rival_beats_its_floor(mask: str, place: str, layout: str) -> None:
    cluster = cluster_of(place)
    where = Where.of(cluster)
    assert where.costs is not None
    chunks = default_layout(layout, MASKS[mask], 4096, cluster.ranks, None, 16)
    shape = Shape(4096, 4096, 8, 2, 64, 32, "bfloat16", 1.0)
    made = setting(MASKS[mask], shape, chunks, chunks)
    for pass_ in Pass:
        floors = Floors(pass_, made, where.place.node_of, where.costs)
        for rival in NAMES.values():
            for variant in rival.variants(made.problem, cluster.ranks):
                part = timed(pass_, made, where, rival_pass(pass_, variant, made, where))
                assert part.predicted_s is not None
                # Simulated times are kept in whole nanoseconds.
                assert floors.of_rival(variant) <= part.predicted_s + 1e-9, variant.label


def test_columns_of_a_grid_are_those_of_its_blocks() -> None:
    from ultraattn.planning.blocks import blocks_of

    chunks = default_layout("contiguous", MASKS["star"], 96, 3, 6, 1)
    made = setting(MASKS["star"], Shape(96, 96, 4, 2, 8, 8, "float32", 1.0), chunks, chunks)
    one, other = Columns.of(blocks_of(made.grid, 4, 1)), Columns.of_grid(made, 4)
    for name in Columns.__dataclass_fields__:
        assert getattr(one, name).tolist() == getattr(other, name).tolist()


def test_the_notes_say_what_was_simulated_and_what_was_left_out_and_why() -> None:
    plan = planned(MASKS["window"], cluster_of("one"), "auto", "fast")
    notes = "\n".join(plan.forward.notes)
    named = {rival for rival in NAMES if rival in notes}
    assert "simulated: " in notes
    assert named >= {"ring", "allgather", "heads", "mesh"}
    assert notes.count("layout ") >= 2


def test_a_rival_that_cannot_serve_is_left_out_with_what_would_fit() -> None:
    plan = ua.plan(
        masks.causal(), seqlen=512, heads=2, head_dim=16, cluster=cluster_of("one"),
        strategy="auto", effort="instant",
    )  # fmt: skip
    assert any(
        "left out: strategy heads with 2 heads over 4 ranks" in n for n in plan.forward.notes
    )


def test_auto_needs_costs() -> None:
    with pytest.raises(InputError, match=r"'auto' on cluster 'bare', which has no costs"):
        ua.plan(
            masks.causal(), seqlen=64, heads=2, head_dim=16, cluster=Cluster("bare", 1, 2),
            strategy="auto",
        )  # fmt: skip


def test_a_layout_that_is_asked_for_is_kept() -> None:
    plan = ua.plan(
        masks.causal(), seqlen=512, heads=2, head_dim=16, cluster=cluster_of("one"),
        strategy="auto", layout="zigzag", effort="fast",
    )  # fmt: skip
    assert plan.layout.name == "zigzag"


def test_every_strategy_that_auto_may_choose_can_be_asked_for_by_the_name_it_shows() -> None:
    for mask in ("causal", "star"):
        plan = planned(MASKS[mask], cluster_of("two"), "auto", "instant")
        for pass_ in Pass:
            name = plan.pass_plan(pass_).strategy
            assert name in ("tile", "rows") or by_name(name).label == name


@pytest.mark.parametrize("mask", sorted(MASKS))
def test_an_instant_choice_builds_a_candidate_or_two_a_pass(
    mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []
    for name in ("own_pass", "rival_pass"):
        real = getattr(choose, name)

        def counted(pass_: Pass, *rest: Any, real: Any = real) -> Any:
            built.append(str(pass_))
            return real(pass_, *rest)

        monkeypatch.setattr(choose, name, counted)
    plan = planned(MASKS[mask], cluster_of("one"), "auto", "instant")
    plan.check()
    for pass_ in Pass:
        assert 1 <= built.count(str(pass_)) <= 2
        assert plan.pass_plan(pass_).predicted_ns is not None


def test_an_instant_choice_keeps_rows_level() -> None:
    layouts = [
        planned(mask, cluster_of("one"), "auto", "instant").q_layout.name
        for mask in (masks.causal(), masks.full())
    ]
    assert layouts == ["zigzag", "contiguous"]


def test_where_whole_chunks_move_what_nobody_sees_finer_ones_are_tried() -> None:
    pair = Cluster.load("a800").resize(2, 1)

    def chosen(layout: str, chunks: int | None) -> Plan:
        return ua.plan(
            masks.sliding_window(1024), seqlen=65536, heads=32, kv_heads=8, head_dim=128,
            cluster=pair, strategy="auto", effort="fast", layout=layout, chunks=chunks,
        )  # fmt: skip

    best = chosen("auto", None)
    assert len(best.q_layout.chunks) > 4
    coarse = [chosen("contiguous", 2), chosen("zigzag", 4)]
    assert time_ns(best) * 1.05 < min(map(time_ns, coarse))


def test_finer_chunks_are_tried_for_masks_that_leave_much_of_a_chunk_unseen_alone() -> None:
    def finer(mask: Mask) -> list[int]:
        def make(count: int) -> Setting:
            chunks = default_layout("contiguous", mask, 4096, 4, count, 16)
            return setting(mask, Shape(4096, 4096, 8, 2, 64, 64, "bfloat16", 1.0), chunks, chunks)

        return [len(made.q_layout.chunks) for made in with_less_to_fetch(make, make(4))]

    assert finer(masks.full()) == finer(masks.causal()) == []
    halfway, last = finer(masks.sliding_window(128))
    assert 4 < halfway < last
    # A rank needs 127 rows of the one before; chunks of 128 rows bring no more than one.
    assert last == 4096 // 128


@pytest.mark.parametrize("effort", ["instant", "fast", "normal"])
@pytest.mark.parametrize(("mask", "place"), CELLS[::2])
def test_auto_is_never_slower_than_tile_at_the_same_effort(
    mask: str, place: str, effort: str
) -> None:
    chosen, tile = (
        ua.simulate(planned(MASKS[mask], cluster_of(place), strategy, effort)).makespan_s
        for strategy in ("auto", "tile")
    )
    assert chosen <= tile * (1 + 1e-9)


def test_an_instant_choice_over_many_ranks_is_no_slower_than_tile() -> None:
    cluster = Cluster.load("h100").resize(8, 8)
    times = [
        ua.simulate(
            ua.plan(
                masks.strided(), seqlen=65536, heads=32, kv_heads=8, head_dim=128,
                cluster=cluster, strategy=strategy, effort="instant",
            )
        ).makespan_s
        for strategy in ("auto", "tile")
    ]  # fmt: skip
    assert times[0] <= times[1]
