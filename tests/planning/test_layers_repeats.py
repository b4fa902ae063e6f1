"""Plans in layers are the same bytes under any hash seed, on one core or two, without numba."""

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
import ultraattn as ua
from ultraattn.planning import schedule, tiling, two_levels
from ultraattn.planning.tiling import Effort
# Searches cut short, so that they end soon without numba as well.
two_levels.PROPOSALS[Effort.FAST] = 2_000
for steps in (tiling.STEPS, schedule.STEPS):
    steps[Effort.FAST] = steps[Effort.INSTANT]
digest = hashlib.sha256()
layered = 0
for mask in (ua.masks.document([700, 90, 234]), ua.masks.sliding_window(100)):
    for strategy in ("tile", "auto"):
        plan = ua.plan(
            mask, seqlen=1024, heads=4, kv_heads=2, head_dim=64, strategy=strategy, effort="fast",
            cluster=ua.Cluster.load("h100").resize(2, 2),
        )
        digest.update(plan.digest.encode())
        layered += "in layers" in " ".join(plan.forward.notes + plan.backward.notes)
assert layered
print(digest.hexdigest())
"""


digest = functools.partial(printed, SCRIPT)


@pytest.fixture(scope="module")
def plain() -> str:
    found = digest("0", 2)
    assert len(found) == len(hashlib.sha256().hexdigest())
    return found


def test_hash_seed_and_cores_do_not_change_a_plan_in_layers(plain: str) -> None:
    assert digest("77", 1) == plain


def test_a_plan_in_layers_is_the_same_without_numba_and_without_the_solver(plain: str) -> None:
    assert digest("2", 2, blocked=("numba", "ortools")) == plain
