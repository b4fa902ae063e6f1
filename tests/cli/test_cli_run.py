"""`ultraattn run`: a checked distributed attention over local processes, or torchrun's."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from ultraattn.cli import run as run_module
from ultraattn.cli.arguments import make_plan
from ultraattn.cli.layer import Text, inputs
from ultraattn.cli.options import PlanOptions
from ultraattn.cli.run import Job, Report, read_text
from ultraattn.cli.steps import Steps
from ultraattn.errors import InputError, RunError
from ultraattn.plans.check import Pass
from ultraattn.plans.problem import Problem

Call = Callable[..., tuple[int, str, str]]

OPTIONS = PlanOptions(
    seqlen="50", kv_seqlen="70", heads=4, kv_heads=2, head_dim=8, ranks=3, strategy="rows"
)


@pytest.fixture(scope="module")
def report() -> Report:
    """A run of 50 queries over 70 keys, batch 2, on three processes."""
    job = Job(OPTIONS, None, None, 2, 0, None, 120.0)
    found = run_module.run(job, Steps(None))
    assert found is not None
    return found


def test_a_run_is_right_and_counts_what_was_planned(report: Report):
    assert report.faults == ()
    for index, pass_ in enumerate(Pass):
        assert sum(sent for sent, _ in report.planned(pass_)) > 0
        counted = tuple((r.sent[index], r.received[index]) for r in report.results)
        assert counted == report.planned(pass_)
    assert report.planned(Pass.FORWARD)[0][0] == 2 * report.plan.forward_account.sent[0]


def test_facts_of_a_run_hold_errors_limit_bytes_and_seconds_by_rank(report: Report):
    facts = json.loads(json.dumps(report.facts()))
    assert set(facts["errors"]) == {"out", "dq", "dk", "dv"}
    assert all(0 < error < facts["limit"] < 1e-5 for error in facts["errors"].values())
    assert len(facts["bytes_sent"]) == len(facts["seconds"]) == 3
    assert all(seconds > 0 for seconds in facts["seconds"])
    assert facts["digest"] == report.plan.digest


@pytest.fixture
def result(report: Report, monkeypatch: pytest.MonkeyPatch):
    """Makes `ultraattn run` find the report, changed as told, without running again."""

    def put(change) -> None:
        monkeypatch.setattr(run_module, "run", lambda job, steps: change(report))

    return put


def wrong_error(report: Report, value: float) -> Report:
    errors = report.verdict.errors
    changed = dataclasses.replace(errors, norm={**errors.norm, "dk": value})
    return dataclasses.replace(report, verdict=dataclasses.replace(report.verdict, errors=changed))


def test_a_right_run_ends_with_the_table_and_exit_code_0(call: Call, result):
    result(lambda report: report)
    code, out, _ = call("run")
    assert code == 0
    for word in ("forward by rank", "backward by rank", "dk", "same", "is right"):
        assert word in out


@pytest.mark.parametrize("value", [0.5, math.nan])
def test_an_error_above_its_limit_is_exit_code_1(call: Call, result, value: float):
    result(lambda report: wrong_error(report, value))
    code, out, err = call("run")
    assert code == 1
    assert "too large" in out
    assert "dk: error" in err
    code, out, err = call("run", "--json")
    assert code == 1
    assert json.loads(out)["ok"] is False


def test_a_byte_that_was_not_planned_is_exit_code_1(call: Call, result):
    def change(report: Report) -> Report:
        first = report.results[0]
        more = dataclasses.replace(first, sent=(first.sent[0] + 1, first.sent[1]))
        return dataclasses.replace(report, results=(more, *report.results[1:]))

    result(change)
    code, _, err = call("run")
    assert code == 1
    assert "rank 0, forward" in err


def test_a_run_that_fails_is_exit_code_1_without_a_trace(call: Call, result):
    def fail(report: Report) -> Report:
        raise RunError("rank 1: RuntimeError: no more memory")

    result(fail)
    code, out, err = call("run")
    assert (code, out) == (1, "")
    assert "rank 1" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--batch", 0), "--batch 0"),
        (("--text", "/nowhere/book.txt"), "/nowhere/book.txt"),
        (("--text", "/dev/null"), "empty"),
    ],
)
def test_bad_input_of_a_run_is_exit_code_2(call: Call, arguments: tuple[object, ...], said: str):
    code, out, err = call("run", *arguments)
    assert (code, out) == (2, "")
    assert said in err


def test_the_default_text_is_the_readme():
    name, data = read_text(None)
    assert name == "README.md"
    assert data.startswith(b"# UltraAttn")


def test_an_installation_without_a_readme_asks_for_a_text(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> None:
        raise run_module.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(run_module, "README", Path("/nowhere/README.md"))
    monkeypatch.setattr(run_module.metadata, "metadata", missing)
    with pytest.raises(InputError, match="--text FILE"):
        read_text(None)


@pytest.fixture(scope="module")
def problem() -> Problem:
    options = dataclasses.replace(OPTIONS, dtype="float64")
    return make_plan(options)[0].problem


def test_tokens_are_the_same_wherever_they_are_made(problem: Problem):
    text = Text(b"the quick brown fox", 2, 3)
    whole = inputs(problem, text, np.arange(50), np.arange(70))
    some = np.array([7, 3, 49])
    part = inputs(problem, text, some, some)
    for name in ("q", "k", "v", "dout"):
        torch.testing.assert_close(getattr(part, name), getattr(whole, name)[:, :, some])


def test_a_token_at_a_wrong_position_is_another_token(problem: Problem):
    text = Text(b"a", 1, 0)
    whole = inputs(problem, text, np.arange(50), np.arange(70))
    for tensor in (whole.q, whole.k):
        apart = (tensor[:, :, 1:] - tensor[:, :, :-1]).abs().amax(dim=(0, 1, 3))
        assert float(apart.min()) > 0.1
    # One byte everywhere: values, which are not turned, are all the same.
    torch.testing.assert_close(whole.v, whole.v[:, :, :1].expand_as(whole.v))


def test_scores_of_equal_tokens_depend_on_their_distance_alone(problem: Problem):
    x = inputs(problem, Text(b"a", 1, 0), np.arange(50), np.arange(70))
    scores = x.q[0, 0] @ x.k[0, 0].T
    # Queries and keys end at the same token: query i stands at place i + 20.
    for distance in (0, 5, 20):
        line = scores.diagonal(20 - distance)
        torch.testing.assert_close(line, line[:1].expand_as(line))


def test_a_plan_file_runs_under_torchrun(call: Call, python, tmp_path: Path):
    file = tmp_path / "plan.json"
    call("plan", "--seqlen", 40, "--ranks", 2, "--mask", "sliding_window", "--window", 9,
         "--effort", "instant", "--out", file)  # fmt: skip
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", 2)
    done = python(*torchrun, "-m", "ultraattn.cli", "run", file, "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["ok"]
    assert facts["ranks"] == 2
