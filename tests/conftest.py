"""Fixtures of all tests: lasting pools of local ranks, one for each number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from ultraattn.runtime.local import LocalRanks


@pytest.fixture(scope="session")
def local_ranks() -> Iterator[Callable[[int], LocalRanks]]:
    """`local_ranks(n)`: n processes in one gloo group, kept for the whole run of the tests.

    A test that breaks a group (a rank that fails, dies or hangs) makes LocalRanks of its own.
    """
    pools: dict[int, LocalRanks] = {}

    def pool(ranks: int) -> LocalRanks:
        if ranks not in pools:
            pools[ranks] = LocalRanks(ranks, timeout_s=120)
        return pools[ranks]

    yield pool
    for made in pools.values():
        made.close()
