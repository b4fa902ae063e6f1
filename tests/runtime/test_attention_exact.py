"""A subset of the matrix in which every pair of axis values meets, and draws from all of it."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.exactness.cases import AXES, LONG, Case, covering, impossible, pairs, possible_pairs
from tests.exactness.judge import run_case

CASES = covering(AXES)
SHORT = {**AXES, "lengths": ((7, 7), (64, 64), (1, 1000), (64, 1000), (300, 128))}


def check(case, local_ranks):
    mask = case.make_mask()
    verdict = run_case(case, mask, case.make_plan(mask), local_ranks)
    assert not verdict.wrong, case.key


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.key)
def test_equals_dense_attention(case, local_ranks):
    check(case, local_ranks)


def test_the_subset_holds_every_possible_pair():
    held = {pair for case in CASES for pair in pairs(case)}
    assert possible_pairs(AXES) <= held
    assert any(case.lengths == LONG for case in CASES)


@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(values=st.tuples(*(st.sampled_from(options) for options in SHORT.values())))
def test_any_combination_equals_dense_attention(values, local_ranks):
    case = Case(*values)
    assume(impossible(case) is None)
    check(case, local_ranks)
