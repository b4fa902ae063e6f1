"""Turns the work of a mask at several partition degrees into the degree to use (design, Degree)."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from ultraattn.errors import InputError

DEFAULT_ETA = Fraction(1, 20)


def imbalance(weight: int | Fraction, ranks: int) -> Fraction:
    """U = ceil(W / N) / (W / N) - 1, with W in full blocks: how uneven whole blocks must be.

    Without work there is nothing to balance: 0.

    >>> [round(float(imbalance(Fraction(w, 2), 4)), 2) for w in (4, 9, 16, 25)]
    [1.0, 0.78, 0.0, 0.28]
    """
    if ranks < 1 or weight < 0:
        raise InputError(f"weight {weight} on {ranks} ranks: expected weight >= 0 and ranks >= 1")
    if weight == 0:
        return Fraction(0)
    mean = Fraction(weight) / ranks
    return -(-mean // 1) / mean - 1


def choose_degree(
    weights: Mapping[int, int | Fraction],
    ranks: int,
    eta: Fraction | float = DEFAULT_ETA,
) -> int:
    """The smallest P whose imbalance is at most `eta`; the least uneven one where none is.

    Args:
        weights: partition degree P to the weight of the mask at P, in full blocks.
        ranks: number of ranks N.
        eta: the imbalance allowed.

    >>> choose_degree({2: 2, 3: Fraction(9, 2), 4: 8, 5: Fraction(25, 2)}, ranks=4)
    4
    """
    if not weights:
        raise InputError("no partition degree given: expected at least one")
    uneven = {degree: imbalance(weights[degree], ranks) for degree in sorted(weights)}
    limit = Fraction(eta)
    within = [degree for degree, value in uneven.items() if value <= limit]
    if within:
        return within[0]
    return min(uneven, key=lambda degree: (uneven[degree], degree))
