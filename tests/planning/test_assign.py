"""Plans by the tile strategy: what they move, how level they are, and what they say of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ultraattn as ua
from ultraattn.errors import InputError
from ultraattn.plans import Pass, Plan


def planned(mask: ua.masks.Mask, **options: Any) -> Plan:
    wanted: dict[str, Any] = {
        "seqlen": 8192, "heads": 8, "head_dim": 64, "ranks": 8, "effort": "fast",
    }  # fmt: skip
    return ua.plan(mask, **(wanted | options))


def unit_bytes(plan: Plan) -> int:
    """One chunk of an eighth of the sequence, all query heads."""
    p = plan.problem
    return p.q_len // 8 * p.heads * p.head_dim * 2


@pytest.mark.parametrize("pass_", Pass)
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 32), (32, 8), (8, 1), (1, 1)])
@pytest.mark.parametrize("mask", [ua.masks.full(), ua.masks.causal(), ua.masks.star()], ids=str)
def test_bounds_state_what_the_program_moves(
    mask: ua.masks.Mask, heads: int, kv_heads: int, pass_: Pass
) -> None:
    plan = planned(mask, heads=heads, kv_heads=kv_heads)
    account, bounds = plan.account(pass_), plan.pass_plan(pass_).bounds
    assert account.max_volume == bounds.max_volume
    assert bounds.lower_bound <= bounds.max_volume
    assert int(account.load.sum()) == plan.problem.visible_pairs


def test_full_attention_with_many_heads_is_split_by_heads_unasked() -> None:
    plan = planned(ua.masks.full(), heads=32, kv_heads=32)
    units = plan.forward.bounds.max_volume / unit_bytes(plan)
    assert units == pytest.approx(3.5, abs=0.04)  # 3.5 and the LSEs, against 8 for tiles alone.
    tiles = planned(ua.masks.full(), heads=32, kv_heads=32, head_groups=1)
    assert tiles.forward.bounds.max_volume / unit_bytes(tiles) == pytest.approx(8, abs=0.05)


@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (8, 1)])
@pytest.mark.parametrize("pass_", Pass)
def test_grouped_heads_move_no_more_than_rows_or_heads(
    heads: int, kv_heads: int, pass_: Pass
) -> None:
    shape = {"heads": heads, "kv_heads": kv_heads}
    best = planned(ua.masks.full(), **shape).pass_plan(pass_).bounds.max_volume
    rows = planned(ua.masks.full(), strategy="rows", **shape).pass_plan(pass_).bounds.max_volume
    by_heads = planned(ua.masks.full(), head_groups=8, **shape).pass_plan(pass_).bounds.max_volume
    assert best <= min(rows, by_heads)


def test_traffic_scales_with_kv_heads_and_not_with_heads() -> None:
    volume = {
        kv_heads: planned(
            ua.masks.causal(), heads=8, kv_heads=kv_heads, strategy="rows"
        ).forward.bounds.max_volume
        for kv_heads in (1, 2, 8)
    }
    assert volume[2] == 2 * volume[1]
    assert volume[8] == 8 * volume[1]


@pytest.mark.parametrize("mask", [ua.masks.causal(), ua.masks.star()], ids=str)
def test_loads_keep_the_cap(mask: ua.masks.Mask) -> None:
    for cap in (1.05, 1.3):
        plan = planned(mask, load_cap=cap)
        raised = any("cap raised" in note for note in plan.forward.notes)
        assert raised or plan.forward_account.load_over_mean <= cap + 1e-9


def test_an_infeasible_cap_is_raised_and_said_or_refused() -> None:
    plan = planned(ua.masks.causal(), load_cap=1.0, chunks=8, head_groups=1)
    assert any("cap raised" in note for note in plan.forward.notes)
    with pytest.raises(InputError, match="least feasible"):
        planned(ua.masks.causal(), load_cap=1.0, chunks=8, head_groups=1, strict_cap=True)


def test_more_head_ranges_than_heads_are_refused() -> None:
    with pytest.raises(InputError, match="head_groups 9 of 8 heads"):
        planned(ua.masks.full(), head_groups=9)


@pytest.mark.parametrize(
    ("name", "given"), [("effort", "eager"), ("units", "miles"), ("layout", "spiral")]
)
def test_unknown_choices_list_the_valid_ones(name: str, given: str) -> None:
    with pytest.raises(InputError, match=f"{given}.*expected one of"):
        planned(ua.masks.full(), **{name: given})


def paper(mask: ua.masks.Mask, ranks: int = 8, chunks: int = 8, **options: Any) -> Plan:
    return ua.plan(
        mask, seqlen=65536, heads=1, head_dim=128, ranks=ranks, chunks=chunks,
        layout="contiguous", units="paper", **options,
    )  # fmt: skip


def test_paper_units_prove_the_published_optima() -> None:
    assert paper(ua.masks.causal(), load_cap=4.5).forward.bounds.proved
    assert paper(ua.masks.causal(), load_cap=4.5).forward.bounds.max_volume == 6
    assert paper(ua.masks.causal(), load_cap=8).forward.bounds.max_volume == 5


@pytest.mark.parametrize("mask", [ua.masks.star(), ua.masks.streaming()], ids=str)
def test_star_and_streaming_prove_six_and_five(mask: ua.masks.Mask) -> None:
    for cap, expected in ((3, 6), (3.5, 5)):
        bounds = paper(mask, load_cap=cap).forward.bounds
        assert (bounds.max_volume, bounds.proved) == (expected, True)


@pytest.mark.parametrize(("ranks", "expected"), [(8, 8), (16, 12), (32, 20), (64, 28)])
def test_full_attention_proves_the_mesh(ranks: int, expected: int) -> None:
    bounds = paper(ua.masks.full(), ranks, ranks).forward.bounds
    assert (bounds.max_volume, bounds.proved) == (expected, True)


def test_paper_units_need_a_mask_with_cells() -> None:
    with pytest.raises(InputError, match="paper"):
        paper(ua.masks.sliding_window(4096))


def test_star_row_owners_are_forty_percent_over() -> None:
    plan = planned(ua.masks.star(), strategy="rows", seqlen=2**20)
    assert plan.forward_account.load_over_mean == pytest.approx(1.4, abs=1e-3)
    cell = (2**20 // 4) ** 2 * plan.problem.heads
    assert plan.forward_account.load[-1] / cell == pytest.approx(0.875, abs=1e-4)


def test_swaps_of_owners_find_the_strided_remap() -> None:
    contiguous = planned(ua.masks.strided(), ranks=4, layout="contiguous", chunks=16)
    remapped = planned(ua.masks.strided(), ranks=4, layout="remapped", chunks=16)
    from ultraattn.planning.layout_search import searched

    grid = ua.masks.strided().grid(contiguous.layout.chunks, contiguous.layout.chunks)
    found = searched(contiguous.layout, grid.kinds[0].any(axis=0))
    assert found is not None
    groups = [{i % 4 for i in owned} for owned in found.owned]
    assert sorted(map(tuple, groups)) == [(0,), (1,), (2,), (3,)]
    assert np.all(np.bincount(found.owners) == 4)
    assert remapped.forward.bounds.max_volume == 0 < contiguous.forward.bounds.max_volume


def test_sliding_windows_stay_contiguous_rows() -> None:
    plan = planned(ua.masks.sliding_window(256))
    assert plan.layout.name == "contiguous"
    rows = planned(ua.masks.sliding_window(256), strategy="rows")
    assert plan.forward.bounds.max_volume <= rows.forward.bounds.max_volume


def test_the_degree_grows_until_blocks_can_be_level() -> None:
    star = planned(ua.masks.star(), effort="instant")
    assert len(star.layout.chunks) > 8
    assert len(planned(ua.masks.full(), effort="instant").layout.chunks) == 8


@pytest.mark.parametrize(
    "mask",
    [ua.masks.global_local(), ua.masks.star(), ua.masks.document([700, 1300, 96, 2000, 4096])],
    ids=str,
)
def test_the_degree_grows_until_little_work_is_partial(mask: ua.masks.Mask) -> None:
    plan = planned(mask, ranks=2, effort="instant")
    blocks = plan.forward.program.blocks
    partial = blocks.weight[blocks.kind == ua.masks.BlockKind.PARTIAL.code].sum()
    assert partial <= plan.problem.visible_pairs / 8
    coarse = planned(mask, ranks=2, effort="instant", chunks=2).forward.program.blocks
    assert coarse.weight[coarse.kind == ua.masks.BlockKind.PARTIAL.code].sum() > partial
