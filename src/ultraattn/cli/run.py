"""Runs a plan over local processes or torchrun's, and holds the result against dense attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ultraattn.cli.arguments import make_plan, plan_of, reason
from ultraattn.cli.group import started_by_torchrun, torchrun_group
from ultraattn.cli.options import DEFAULTS, PlanOptions
from ultraattn.cli.steps import Steps
from ultraattn.errors import InputError, RunError
from ultraattn.plans import Plan
from ultraattn.plans.check import Pass

if TYPE_CHECKING:
    from ultraattn.cli.compare import Verdict
    from ultraattn.cli.worker import RankResult
    from ultraattn.runtime import verify

README = Path(__file__).parents[3] / "README.md"


@dataclass(frozen=True)
class Report:
    """What a run found."""

    plan: Plan
    planning_s: float | None
    batch: int
    text_name: str
    results: tuple[RankResult, ...]
    """In order of rank."""
    verdict: Verdict

    def planned(self, pass_: Pass) -> tuple[tuple[int, int], ...]:
        """(sent, received) bytes of each rank in one pass, as the plan says."""
        account = self.plan.account(pass_)
        pairs = zip(account.sent.tolist(), account.received.tolist(), strict=True)
        return tuple((self.batch * sent, self.batch * received) for sent, received in pairs)

    @property
    def faults(self) -> tuple[str, ...]:
        """What is wrong; empty for a run that is right."""
        faults = self.verdict.faults
        for index, pass_ in enumerate(Pass):
            for result, planned in zip(self.results, self.planned(pass_), strict=True):
                counted = (result.sent[index], result.received[index])
                if counted != planned:
                    faults.append(
                        f"rank {result.rank}, {pass_}: sent and received {counted} bytes, the plan "
                        f"says {planned}"
                    )
        return tuple(faults)

    def facts(self) -> dict[str, Any]:
        """What `--json` prints."""
        errors, limits = self.verdict.errors, self.verdict.limits
        return {
            **self.plan.facts(),
            "planning_s": self.planning_s,
            "batch": self.batch,
            "text": self.text_name,
            "ok": not self.faults,
            "errors": errors.norm,
            "limits": limits.norm,
            "limit": max(limits.norm.values()),
            "single_errors": errors.single,
            "single_limits": limits.single,
            "bytes_sent": [sum(r.sent) for r in self.results],
            "bytes_received": [sum(r.received) for r in self.results],
            "seconds": [sum(r.seconds) for r in self.results],
            "forward_s": [r.seconds[0] for r in self.results],
            "backward_s": [r.seconds[1] for r in self.results],
        }


@dataclass(frozen=True)
class Job:
    """What to run: a plan's file, or the options to make one; and the input."""

    options: PlanOptions
    file: Path | None
    text: Path | None
    batch: int
    seed: int
    out: Path | None
    timeout_s: float
    device: str = "auto"


def run(job: Job, steps: Steps) -> Report | None:
    """Plans, runs and compares; None on the ranks of torchrun but the first.

    Raises:
        InputError: an option cannot be served.
        RunError: a rank failed, died or hung.
    """
    if job.batch < 1:
        raise InputError(f"--batch {job.batch}: expected at least 1")
    name, data = read_text(job.text)
    if started_by_torchrun():
        return _run_joined(job, name, data, steps)
    plan, planning_s = _plan(job, len(data), steps)
    with steps.step("import torch"):
        from ultraattn.cli.layer import Text
        from ultraattn.cli.worker import work
        from ultraattn.plans.storage import dumps
        from ultraattn.runtime.local import LocalRanks
    text = Text(data, job.batch, job.seed)
    with steps.step(f"start {plan.ranks} local processes"):
        ranks = LocalRanks(plan.ranks, timeout_s=job.timeout_s)
    with ranks, steps.step("share the plan, run forward and backward"):
        results = ranks.run(work, dumps(plan), text)
    return _report(plan, planning_s, name, text, results, steps)


def _run_joined(job: Job, name: str, data: bytes, steps: Steps) -> Report | None:
    """As `run`, on one of the processes that torchrun started: rank 0 plans for all."""
    import torch.distributed as dist

    from ultraattn.cli.layer import Text
    from ultraattn.cli.worker import run_rank
    from ultraattn.runtime import share

    with torchrun_group(job.timeout_s, job.device) as device:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        plan, planning_s, error = None, None, None
        if rank == 0:
            try:
                plan, planning_s = _plan(job, len(data), steps, joined=ranks)
            except Exception as caught:
                error = caught
        try:
            plan = share(plan)
        except RunError:
            raise error or RunError(f"rank {rank}: rank 0 could not plan; see its error") from None
        text = Text(data, job.batch, job.seed)
        with steps.step(f"join {ranks} ranks on {device.type}, run forward and backward"):
            result = run_rank(plan, text, device)
        gathered: list[Any] | None = [None] * ranks if rank == 0 else None
        dist.gather_object(result, gathered)
        report = _report(plan, planning_s, name, text, gathered, steps) if gathered else None
        # The others end as the first does, which has compared.
        wrong = [bool(report.faults) if report else None]
        dist.broadcast_object_list(wrong)
        if report is None and wrong[0]:
            raise RunError(f"rank {rank}: the result is wrong; see rank 0")
        return report


def _plan(
    job: Job, text_bytes: int, steps: Steps, joined: int | None = None
) -> tuple[Plan, float | None]:
    with steps.step("plan"):
        if job.file is not None:
            plan, planning_s = plan_of(job.options, job.file), None
        else:
            default = min(text_bytes, DEFAULTS["seqlen"])
            plan, planning_s = make_plan(job.options, seqlen=default, ranks=joined)
        if joined is not None and plan.ranks != joined:
            raise InputError(
                f"a plan for {plan.ranks} ranks under torchrun with {joined} processes; start as "
                "many as the plan has ranks, or leave out --ranks"
            )
        if job.out is not None:
            save(plan, job.out)
    return plan, planning_s


def save(plan: Plan, path: Path) -> None:
    """Writes a plan's file; says what to do where that fails."""
    try:
        plan.save(path)
    except OSError as error:
        raise InputError(
            f"--out {path}: {reason(error)}; name a file in a folder that exists and can be "
            "written to"
        ) from None


def read_text(path: Path | None) -> tuple[str, bytes]:
    """A name and the bytes of a text: of `path`, or of the project's own README.

    Raises:
        InputError: the file cannot be read, or is empty.
    """
    if path is not None:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise InputError(f"--text {path}: {reason(error)}; name a file to read") from None
        if not data:
            raise InputError(f"--text {path}: an empty file; name one of at least one byte")
        return path.name, data
    if README.is_file():
        return "README.md", README.read_bytes()
    try:
        body = metadata.metadata("ultraattn").json.get("description")
    except metadata.PackageNotFoundError:
        body = None
    if not body:
        raise InputError("this installation has no README to read; pass --text FILE")
    return "README.md", str(body).encode()


def _report(
    plan: Plan,
    planning_s: float | None,
    name: str,
    text: Any,
    results: Sequence[RankResult],
    steps: Steps,
) -> Report:
    from ultraattn.cli.compare import Judge
    from ultraattn.cli.layer import inputs
    from ultraattn.runtime.attention import mask_of

    ordered = tuple(sorted(results, key=lambda result: result.rank))
    problem = plan.problem
    with steps.step("dense attention in float64 on one process, and compare"):
        whole = inputs(problem, text, np.arange(problem.q_len), np.arange(problem.kv_len))
        verdict = Judge(problem, mask_of(plan, None), whole).verdict(joined(plan, ordered))
    return Report(plan, planning_s, text.batch, name, ordered, verdict)


def joined(plan: Plan, ordered: Sequence[RankResult]) -> verify.Results:
    """The whole out, dQ, dK and dV from those of the ranks, in order."""
    import torch

    from ultraattn.runtime import verify

    out, dq, dk, dv = (
        torch.from_numpy(
            plan.unshard(
                [result.tensors[which] for result in ordered], dim=2, keys=which in ("dk", "dv")
            )
        )
        for which in verify.NAMES
    )
    return verify.Results(out, dq, dk, dv)
