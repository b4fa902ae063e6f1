from __future__ import annotations

from fractions import Fraction

import pytest

from ultraattn.errors import InputError
from ultraattn.planning.degree import choose_degree, imbalance

CAUSAL = {chunks: Fraction(chunks * chunks, 2) for chunks in (2, 3, 4, 5)}


def test_imbalance_of_causal_on_four_ranks_is_the_papers() -> None:
    assert [imbalance(CAUSAL[p], 4) for p in (2, 3, 4, 5)] == [
        Fraction(1),
        Fraction(7, 9),
        Fraction(0),
        Fraction(7, 25),
    ]


def test_the_smallest_even_degree_is_chosen() -> None:
    assert choose_degree(CAUSAL, 4) == 4


def test_a_wide_tolerance_chooses_a_smaller_degree() -> None:
    assert choose_degree(CAUSAL, 4, eta=0.8) == 3


def test_the_least_uneven_degree_is_chosen_when_none_is_within() -> None:
    assert choose_degree({2: Fraction(2), 3: Fraction(9, 2), 5: Fraction(25, 2)}, 4) == 5


def test_no_work_is_even() -> None:
    assert imbalance(0, 4) == 0


def test_no_degree_is_refused() -> None:
    with pytest.raises(InputError, match="expected at least one"):
        choose_degree({}, 4)
