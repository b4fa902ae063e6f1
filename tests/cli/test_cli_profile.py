"""`ultraattn profile`: measures this machine into a cluster that plans and simulations take."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ultraattn.cluster import Cluster

Call = Callable[..., tuple[int, str, str]]


def test_a_quick_profile_is_a_cluster_that_simulate_takes(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "here.json"
    code, out, err = call("profile", "--quick", "--ranks", 2, "--out", file, "--json")
    facts = json.loads(out)
    cluster = Cluster.load(file)
    costs = cluster.known_costs
    assert code == 0
    assert "backward, partial blocks" in err  # Progress, apart from the result.
    assert (cluster.ranks, costs.measured, costs.host_serial) == (2, True, True)
    assert facts["link_start_s"] == pytest.approx(costs.inside.start_s)
    assert 0 < facts["rate_beside_transfers"] <= 1
    kinds = {(t.pass_, t.kind) for t in costs.kernel().tables}
    assert kinds == {(p, k) for p in ("forward", "backward") for k in ("full", "causal", "partial")}
    large, small = (costs.seconds(n, n, 2, "full", pass_="backward") for n in (1024, 16))
    assert large > small
    code, out, _ = call(
        "simulate", "--cluster", file, "--ranks", 2, "--seqlen", 256, "--heads", 2, "--effort",
        "fast", "--strategy", "ring", "--json",
    )  # fmt: skip
    assert code == 0
    assert json.loads(out)["cluster"] == "measured"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--ranks", 1), "ranks 1: a profile measures messages, so expected at least 2"),
        (("--out", "/nowhere/at/all.json"), "no folder /nowhere/at"),
    ],
)
def test_bad_input_is_refused(
    call: Call, arguments: tuple[object, ...], message: str, tmp_path: Path
) -> None:
    code, _, err = call("profile", "--quick", "--out", tmp_path / "x.json", *arguments)
    assert code == 2
    assert message in err
