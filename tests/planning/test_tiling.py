from __future__ import annotations

import numpy as np
import pytest
from problems import causal, paper, streaming_eight, table, worked_example

from ultraattn.errors import InputError
from ultraattn.planning.ledger import evaluate
from ultraattn.planning.tiling import Effort, solve


@pytest.mark.parametrize("effort", list(Effort))
def test_every_block_is_on_one_rank_within_the_cap(effort: Effort) -> None:
    problem = paper(causal(8), ranks=8, cap=9)
    result = solve(problem, effort)
    assert ((result.assignment >= 0) == (problem.weight > 0)).all()
    ledger = evaluate(problem, result.assignment)
    assert ledger.max_load <= 9
    assert ledger.value == (result.max_volume, result.total, result.max_load)
    assert result.lower_bound <= result.max_volume


def test_a_cap_below_the_heaviest_block_is_raised_and_said() -> None:
    problem = paper(np.array([[5, 0], [0, 1]]), ranks=2, cap=3)
    result = solve(problem, Effort.INSTANT)
    assert result.cap_raised_to == 5
    assert result.max_load == 5


def test_a_strict_cap_below_the_heaviest_block_is_refused() -> None:
    problem = paper(np.array([[5, 0], [0, 1]]), ranks=2, cap=3)
    with pytest.raises(InputError, match=r"below the heaviest block \(5\).*found is 5"):
        solve(problem, Effort.INSTANT, strict_cap=True)


def test_an_infeasible_strict_cap_names_the_least_feasible_one() -> None:
    # Three blocks of 2 on two ranks: one rank has two of them.
    problem = paper(np.diag([2, 2, 2, 0]), ranks=2, cap=3)
    with pytest.raises(InputError, match=r"least feasible cap found is (5|4)"):
        solve(problem, Effort.INSTANT, strict_cap=True)


def test_a_mask_without_work_moves_nothing() -> None:
    result = solve(paper(np.zeros((4, 4), dtype=np.int64), ranks=2, cap=1), Effort.INSTANT)
    assert (result.max_volume, result.total, result.max_load) == (0, 0, 0)


@pytest.mark.parametrize("effort", [Effort.INSTANT, Effort.FAST])
def test_a_pinned_diagonal_stays_with_its_owner(effort: Effort) -> None:
    weight = table(["1111", "1100", "1010", "1001"])
    result = solve(paper(weight, ranks=4, cap=3), effort, pin_diagonal=True)
    assert [int(result.assignment[0, i, i]) for i in range(4)] == [0, 1, 2, 3]


def test_search_is_never_worse_than_structured_starts() -> None:
    problem = paper(streaming_eight(), ranks=8, cap=7)
    assert solve(problem, Effort.FAST).value <= solve(problem, Effort.INSTANT).value


def test_the_worked_example_is_solved() -> None:
    result = solve(worked_example(), Effort.FAST)
    assert (result.max_volume, result.total) == (4, 10)
