"""`ultraattn simulate`: every strategy's predicted time, the choice, and who cannot serve."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable

import pytest

import ultraattn as ua
from ultraattn.strategies import NAMES

Call = Callable[..., tuple[int, str, str]]

SMALL = (
    "--mask", "sliding_window", "--window", 200, "--seqlen", 1024, "--heads", 4, "--kv-heads", 2,
    "--head-dim", 64, "--dtype", "bfloat16", "--cluster", "h100", "--ranks", 2, "--effort", "fast",
)  # fmt: skip


def test_json_maps_every_strategy_to_seconds_and_auto_is_never_above_a_rival(call: Call) -> None:
    code, out, _ = call("simulate", *SMALL, "--json")
    facts = json.loads(out)
    times = facts["strategies"]
    assert code == 0
    assert times.keys() == {"auto", "tile", "rows", *NAMES}
    assert all(times["auto"] <= times[name] for name in NAMES)
    assert facts["chosen"].split(" / ")[0] == facts["strategy"]
    for name, both in times.items():
        parts = facts["forward"][name] + facts["backward_strategies"][name]
        assert both == pytest.approx(parts)


def test_the_table_lists_strategies_in_order_of_time_and_who_cannot_serve(call: Call) -> None:
    code, out, _ = call("simulate", *SMALL, "--heads", 1, "--kv-heads", 1)
    assert code == 0
    assert "heads cannot serve: strategy heads with 1 heads over 2 ranks" in out
    lines = [line.split() for line in out.splitlines()]
    times = [float(row[4]) for row in lines if row and row[0] in {"auto", "tile", "rows", *NAMES}
             and len(row) == 7]  # fmt: skip
    assert len(times) == len(NAMES) + 2
    assert times == sorted(times)


def test_a_named_strategy_is_compared_with_auto_alone(call: Call) -> None:
    facts = json.loads(call("simulate", *SMALL, "--strategy", "ring", "--json")[1])
    assert facts["strategies"].keys() == {"auto", "ring"}


def test_an_unknown_option_value_is_an_error_not_a_refusal(call: Call) -> None:
    code, _, err = call("simulate", *SMALL, "--layout", "spiral")
    assert code == 2
    assert "layout 'spiral'" in err


def test_simulate_is_public_and_gives_what_the_plan_predicts() -> None:
    plan = ua.plan(
        ua.masks.causal(), seqlen=256, heads=2, head_dim=64, ranks=2, dtype="float32",
        strategy="ring",
    )  # fmt: skip
    found = ua.simulate(plan)
    assert found.forward.makespan_s == pytest.approx(plan.forward.predicted_s, abs=1e-9)


def test_simulate_needs_no_torch(python: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    code = "import sys, ultraattn; ultraattn.simulate; sys.exit('torch' in sys.modules)"
    assert python("-c", code).returncode == 0
