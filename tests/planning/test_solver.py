from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from problems import (
    causal,
    contiguous,
    heads,
    paper,
    star_eight,
    streaming_eight,
    table,
    worked_example,
)

from ultraattn.planning.enumerate import optima
from ultraattn.planning.ledger import evaluate
from ultraattn.planning.starts import structured
from ultraattn.planning.tiling import Effort, solve

pytest.importorskip("ortools")

GOLDEN = json.loads(
    (Path(__file__).parents[1] / "data" / "assignment_golden.json").read_text(encoding="utf-8")
)
CROSSED = ("11111111", *("1" + "0" * i + "1" + "0" * (6 - i) for i in range(7)))


def test_the_worked_example_has_24_optima_18_of_least_traffic() -> None:
    found = optima(worked_example())
    assert found.max_volume == 4
    assert len(found.totals) == 24
    assert (min(found.totals), found.totals.count(min(found.totals))) == (10, 18)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["blocks"][0] + case["blocks"][1])
def test_golden_optima_with_the_diagonal_pinned(case: dict[str, object]) -> None:
    weight = table(case["blocks"])  # type: ignore[arg-type]
    problem = paper(weight, ranks=8, cap=-(-int(weight.sum()) // 8))
    result = solve(problem, Effort.NORMAL, pin_diagonal=True)
    assert result.max_volume == case["max_volume"]


def test_without_pinning_the_crossed_table_needs_seven() -> None:
    weight = table(CROSSED)
    result = solve(paper(weight, ranks=8, cap=-(-int(weight.sum()) // 8)), Effort.NORMAL)
    assert (result.max_volume, result.proved) == (7, True)


@pytest.mark.parametrize(
    ("weight", "cap", "volume"),
    [
        (causal(8), 9, 6),
        (causal(8), 16, 5),
        (star_eight(), 6, 6),
        (star_eight(), 7, 5),
        (streaming_eight(), 6, 6),
        (streaming_eight(), 7, 5),
    ],
    ids=["causal 4.5", "causal 8", "star 3", "star 3.5", "streaming 3", "streaming 3.5"],
)
def test_eight_ranks_are_proved(weight: np.ndarray, cap: int, volume: int) -> None:
    result = solve(paper(weight, ranks=8, cap=cap), Effort.NORMAL)
    assert (result.max_volume, result.proved) == (volume, True)


def test_enough_heads_are_cut_before_chunks() -> None:
    # 8 ranks, 32 heads in 8 ranges: 3.5 units of an eighth of the sequence with all heads.
    problem = heads(8, 8, 8, np.ones((8, 8), dtype=np.int64), cap=64)
    result = solve(problem, Effort.NORMAL)
    assert result.max_volume == 28
    assert contiguous(8, 8).tolist() == problem.q_owner.tolist()


@pytest.mark.parametrize("kv_segments", [8, 2, 1])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_head_ranges_are_never_worse_than_the_structured_assignments(
    kv_segments: int, backward: bool
) -> None:
    problem = heads(8, kv_segments, 8, causal(8), cap=68, backward=backward)
    within = [
        ledger.value
        for start in structured(problem)
        if (ledger := evaluate(problem, start.assignment)).max_load <= problem.cap
    ]
    assert within
    assert solve(problem, Effort.FAST).value <= min(within)
