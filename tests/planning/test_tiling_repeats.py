from __future__ import annotations

import functools
import hashlib

import pytest
from repeats import printed

SCRIPT = """
import sys
for name in {blocked}:
    sys.modules[name] = None
import hashlib
from problems import causal, paper, star_eight
from ultraattn.planning import tiling
tiling.STEPS[tiling.Effort.FAST] = tiling.Steps(6_000, 6_000, 2, 1, 0.0, 0)
digest = hashlib.sha256()
for problem in (paper(causal(8), 8, 9), paper(causal(16), 4, 64), paper(star_eight(), 8, 6)):
    digest.update(tiling.solve(problem, tiling.Effort.FAST).assignment.tobytes())
assert 'ortools' not in sys.modules or sys.modules['ortools'] is None
print(digest.hexdigest())
"""


digest = functools.partial(printed, SCRIPT)


@pytest.fixture(scope="module")
def plain() -> str:
    found = digest("0", 2)
    assert len(found) == len(hashlib.sha256().hexdigest())
    return found


@pytest.mark.parametrize(("seed", "cores"), [("1", 2), ("77", 1)])
def test_hash_seed_and_cores_do_not_change_the_assignment(
    plain: str, seed: str, cores: int
) -> None:
    assert digest(seed, cores) == plain


def test_the_assignment_is_the_same_without_numba_and_without_the_solver(plain: str) -> None:
    assert digest("2", 2, blocked=("numba", "ortools")) == plain
