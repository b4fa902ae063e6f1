"""Pictures of plans: right blocks in right colours, well-formed files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

import ultraattn as ua
from ultraattn.masks import BlockKind
from ultraattn.plans.check import Pass
from ultraattn.report.matrix import Matrix, colour, glyph, matrices
from ultraattn.report.svg import matrix_svg, picture
from ultraattn.report.terminal import drawing, rank_table, size

ROOT = Path(__file__).parents[2]


def planned(mask: ua.masks.Mask, **options: object) -> ua.Plan:
    shape = {"seqlen": 96, "heads": 4, "kv_heads": 2, "head_dim": 8, "ranks": 4}
    place = {"layout": "contiguous", "chunks": options.get("ranks", 4), "effort": "instant"}
    return ua.plan(mask, **{**shape, **place, **options})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def plan() -> ua.Plan:
    return planned(ua.masks.causal(), head_groups=1)


@pytest.mark.parametrize("head_groups", [1, 2])
def test_the_matrix_holds_every_block_on_its_rank(head_groups: int):
    plan = planned(ua.masks.strided() | ua.masks.causal(), chunks=16, head_groups=head_groups)
    for pass_ in Pass:
        found = matrices(plan, pass_)
        assert len(found) == head_groups
        loads = np.zeros(4, dtype=np.int64)
        for matrix in found:
            seen = matrix.rank >= 0
            np.add.at(loads, matrix.rank[seen], matrix.weight[seen])
            area = matrix.rows[:, None] * matrix.cols[None, :]
            full = matrix.kind == BlockKind.FULL.code
            heads = matrix.head_stop - matrix.head_start
            assert (matrix.weight[full] == (area * heads)[full]).all()
            assert (matrix.weight[~seen] == 0).all()
        assert loads.tolist() == plan.account(pass_).load.tolist()


def test_a_matrix_too_fine_to_draw_keeps_its_weight():
    plan = planned(ua.masks.causal(), chunks=48, head_groups=1)
    fine, coarse = matrices(plan, Pass.FORWARD)[0], matrices(plan, Pass.FORWARD, most=10)[0]
    assert fine.rank.shape == (48, 48)
    assert coarse.rank.shape == (10, 10)
    assert coarse.blocks_a_side == 5
    assert coarse.weight.sum() == fine.weight.sum()
    assert (coarse.rank >= 0).tolist() == np.tril(np.ones((10, 10), dtype=bool)).tolist()
    assert coarse.rows.sum() == 96


def test_a_coarse_cell_shows_the_rank_with_most_of_it():
    plan = planned(ua.masks.full(), strategy="rows", chunks=8, ranks=8, head_groups=1)
    coarse = matrices(plan, Pass.FORWARD, most=4)[0]
    assert [set(row) for row in coarse.rank.tolist()] == [{0}, {2}, {4}, {6}]
    assert (coarse.kind == BlockKind.FULL.code).all()


def test_ranks_have_different_glyphs_and_colours():
    assert len({glyph(rank) for rank in range(62)}) == 62
    assert len({colour(rank) for rank in range(64)}) == 64


def test_head_ranges_with_one_picture_are_drawn_once():
    rows = drawing(planned(ua.masks.causal(), strategy="rows", head_groups=2)).plain
    assert rows.count("┌") == 1


def test_the_drawing_is_as_wide_as_its_chunks(plan: ua.Plan):
    lines = drawing(plan).plain.splitlines()
    assert lines[1] == "┌" + "─" * 8 + "┐"
    assert [line[7:9] for line in lines[2:6]] == ["··", "··", "··", lines[5][7:9]]
    assert lines[5][8] == "╲"


def test_the_table_stops_at_its_most_ranks():
    plan = planned(ua.masks.full(), strategy="rows", ranks=6)
    assert rank_table(plan).row_count == 6
    assert rank_table(plan, most=4).row_count == 5


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1 << 30, "1.0 GiB"),
        (5 << 50, "5120.0 TiB"),
    ],
)
def test_sizes_read_well(count: int, text: str):
    assert size(count) == text


def polygons(svg: str) -> list[list[tuple[float, float]]]:
    return [
        [(float(x), float(y)) for x, y in (pair.split(",") for pair in points.split())]
        for points in re.findall(r'points="([^"]+)"', svg)
    ]


def area(corners: list[tuple[float, float]]) -> float:
    pairs = zip(corners, corners[1:] + corners[:1], strict=True)
    return abs(sum(x0 * y1 - x1 * y0 for (x0, y0), (x1, y1) in pairs)) / 2


def test_the_area_of_a_shape_is_the_share_of_visible_pairs(plan: ua.Plan):
    matrix = matrices(plan, Pass.FORWARD)[0]
    drawn = sum(area(shape) for shape in polygons(matrix_svg(matrix, 96.0)))
    # One pair is one unit of area, the heads counted once; corners are rounded to a hundredth.
    assert drawn == pytest.approx(int(matrix.weight.sum()) / 4, rel=0.01)


def test_a_window_is_drawn_between_its_two_edges():
    one = np.ones((1, 1), dtype=np.int64)
    sides = np.array([10], dtype=np.int64)
    band = one * BlockKind.BAND.code
    matrix = Matrix(0, 1, 0 * one, band, -one, 2 * one, one, sides, sides, 1)
    [shape] = polygons(matrix_svg(matrix, 10.0))
    differences = [y - x for x, y in shape]
    assert min(differences) == pytest.approx(-1.5)
    assert max(differences) == pytest.approx(2.5)


def test_pictures_are_well_formed_and_self_contained(plan: ua.Plan, tmp_path: Path):
    ua.report(plan, tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text()
    for figure in re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL):
        ET.fromstring(figure)
    assert page.count("<figure>") == 2 * 4
    assert not re.search(r"(src|href)=", page)
    ua.report(plan, tmp_path / "plan.svg")
    assert (tmp_path / "plan.svg").read_text() == picture(plan, Pass.FORWARD)
    ET.fromstring(picture(plan, Pass.FORWARD))


def test_every_task_stands_in_the_page_in_its_order(plan: ua.Plan, tmp_path: Path):
    ua.report(plan, tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text()
    named = re.findall(r"<title>task (\d+):", page)
    counts = [len(plan.pass_plan(pass_).program.tasks.rank) for pass_ in Pass]
    assert sorted(set(map(int, named))) == list(range(max(counts)))


def test_a_file_of_another_kind_or_place_is_refused(plan: ua.Plan, tmp_path: Path):
    with pytest.raises(ua.InputError, match=r"\.html or \.svg"):
        ua.report(plan, tmp_path / "plan.png")
    with pytest.raises(ua.InputError, match="folder that exists"):
        ua.report(plan, tmp_path / "none" / "plan.html")


def test_the_readmes_picture_can_be_drawn_again(tmp_path: Path):
    target = tmp_path / "problem.svg"
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, ROOT / "docs" / "picture.py", target]
    subprocess.run(command, env=environment, check=True, timeout=120)
    again, kept = (ET.parse(file).getroot() for file in (target, ROOT / "docs" / "problem.svg"))
    assert again.attrib == kept.attrib
    assert len(again) == len(kept)
