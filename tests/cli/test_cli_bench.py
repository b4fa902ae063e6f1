"""`ultraattn bench`: every strategy, checked and then timed beside its prediction."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ultraattn.cli import bench as bench_module
from ultraattn.cli.bench import BenchJob, bench
from ultraattn.cli.group import torchrun_group
from ultraattn.cli.options import PlanOptions
from ultraattn.cli.steps import Steps
from ultraattn.errors import InputError

Call = Callable[..., tuple[int, str, str]]

SMALL = ("--seqlen", 48, "--heads", 4, "--kv-heads", 2, "--head-dim", 8, "--ranks", 2,
         "--effort", "instant", "--strategy", "ring", "--repeats", 2)  # fmt: skip


def test_json_holds_every_repeat_beside_the_prediction_and_the_file_is_the_same(
    call: Call, tmp_path: Path
):
    file = tmp_path / "bench.json"
    code, out, _ = call("bench", *SMALL, "--json", "--out", file)
    facts = json.loads(out)
    assert code == 0
    assert json.loads(file.read_text()) == facts
    assert next(iter(facts)) == "over_best"
    assert min(facts["over_best"].values()) == 1
    assert facts["right"] == {"auto": True, "ring": True}
    assert {name: len(times) for name, times in facts["repeats_s"].items()} == {
        "auto": 2, "ring": 2,
    }  # fmt: skip
    for name, times in facts["repeats_s"].items():
        assert all(0 < forward < both for forward, both in times)
        assert facts["predicted_forward_backward_s"][name] > 0
    assert {"torch", "cores", "ultraattn"} <= set(facts["machine"])
    assert facts["command"].startswith("ultraattn bench")
    assert "--repeats 2" in facts["command"]


@pytest.fixture(scope="module")
def found():
    """What a bench of two strategies finds."""
    options = PlanOptions(
        seqlen="48", heads=4, kv_heads=2, head_dim=8, ranks=2, effort="instant", strategy="ring"
    )
    made = bench(BenchJob(options, None, 1, 0, 2, 120.0), Steps(None))
    assert made is not None
    return made


def test_the_table_has_a_row_a_strategy(call: Call, found, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench_module, "bench", lambda job, steps: found)
    code, out, _ = call("bench", *SMALL)
    assert code == 0
    assert all(word in out for word in ("auto", "ring", "predicted", "right", "x best"))


def test_a_wrong_result_is_exit_code_1_and_named(
    call: Call, found, monkeypatch: pytest.MonkeyPatch
):
    found.faults["ring"] = ("dq: error 1, limit 0.1",)
    monkeypatch.setattr(bench_module, "bench", lambda job, steps: found)
    code, out, err = call("bench", *SMALL)
    del found.faults["ring"]
    assert code == 1
    assert "wrong" in out
    assert "ring: dq: error 1, limit 0.1" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--repeats", 0), ("--repeats 0", "at least 1")),
        (("--batch", 0), ("--batch 0", "at least 1")),
        (("--text", "/nowhere.txt"), ("/nowhere.txt",)),
        (("--strategy", "luck"), ("'luck'", "tile")),
    ],
)
def test_bad_input_is_exit_code_2(call: Call, arguments, said):
    code, out, err = call("bench", *SMALL, *arguments)
    assert (code, out) == (2, "")
    assert all(word in err for word in said)


def test_under_torchrun_rank_0_reports(python):
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", 2, "-m", "ultraattn.cli")
    shape = ("--seqlen", 48, "--heads", 4, "--kv-heads", 2, "--head-dim", 8, "--effort", "instant")
    done = python(*torchrun, "bench", *shape, "--strategy", "rows", "--repeats", 1,
                  "--device", "cpu", "--json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["right"] == {"auto": True, "rows": True}


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("tpu", "--device 'tpu': expected one of auto, cpu, cuda"),
        ("cuda", "0 GPUs for the 2 ranks"),
    ],
)
def test_a_device_that_is_not_there_is_refused(device, said, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(InputError, match=said), torchrun_group(10.0, device):
        pass
