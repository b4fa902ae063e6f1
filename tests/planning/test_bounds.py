from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import causal, paper

from ultraattn.planning.bounds import hot_line_bound, lower_bound, rectangle_bound
from ultraattn.planning.ledger import TilingProblem, evaluate


def least_volume(problem: TilingProblem) -> int:
    """By trying every assignment."""
    best = 10**9
    for ranks in itertools.product(range(problem.ranks), repeat=len(problem.blocks)):
        ledger = evaluate(problem, problem.spread(np.array(ranks, dtype=np.int64)))
        if ledger.max_load <= problem.cap:
            best = min(best, ledger.max_volume)
    return best


@pytest.mark.parametrize(("ranks", "volume"), [(8, 8), (16, 12), (32, 20), (64, 28)])
def test_full_masks_on_as_many_chunks_as_ranks_have_the_mesh_optimum(
    ranks: int, volume: int
) -> None:
    problem = paper(np.ones((ranks, ranks), dtype=np.int64), ranks, cap=ranks)
    assert rectangle_bound(problem, upper=2 * volume) == volume


@pytest.mark.parametrize(("cap", "volume"), [(8, 7), (9, 6)])
def test_causal_at_eight_ranks(cap: int, volume: int) -> None:
    assert rectangle_bound(paper(causal(8), 8, cap), upper=14) == volume


def test_a_hot_row_and_column_bound_their_owner() -> None:
    # global_local on 16 chunks, 16 ranks, cap 3: five ranks share column 0 and five share row 0.
    weight = np.eye(16, dtype=np.int64)
    weight[0] = weight[:, 0] = 1
    assert hot_line_bound(paper(weight, 16, cap=3)) == 15


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.integers(2, 3), st.booleans())
def test_bounds_never_exceed_the_optimum(seed: int, ranks: int, backward: bool) -> None:
    rng = np.random.default_rng(seed)
    weight = rng.integers(0, 3, (3, 3)) * (rng.random((3, 3)) < 0.7)
    if not weight.any():
        weight[0, 0] = 1
    cap = max(int(weight.max()), -(-int(weight.sum()) // ranks)) + int(rng.integers(0, 2))
    problem = paper(weight, ranks, cap, backward=backward)
    optimum = least_volume(problem)
    assert lower_bound(problem, upper=10**6) <= optimum
