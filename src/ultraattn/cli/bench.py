"""Runs every strategy of one attention on this machine: checked first, then timed in turns."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich import box
from rich.table import Table

from ultraattn import __version__
from ultraattn.cli.arguments import reason
from ultraattn.cli.group import started_by_torchrun, torchrun_group
from ultraattn.cli.options import DEFAULTS, PlanOptions
from ultraattn.cli.predict import Prediction, predict
from ultraattn.cli.run import joined, read_text
from ultraattn.cli.steps import Steps
from ultraattn.errors import InputError, RunError
from ultraattn.plans import Plan
from ultraattn.plans.storage import dumps, loads

if TYPE_CHECKING:
    from ultraattn.cli.compare import Judge
    from ultraattn.cli.layer import Text
    from ultraattn.cli.worker import RankResult

MOST_PAIRS = 1 << 33
"""Pairs of queries and keys, heads and batch counted, up to which results are checked: dense
attention in float64 on one process takes a few minutes there."""

Times = list[tuple[float, float]]
"""Seconds of (forward, forward and backward), one pair a repeat."""


@dataclass(frozen=True)
class BenchJob:
    """What to measure."""

    options: PlanOptions
    text: Path | None
    batch: int
    seed: int
    repeats: int
    timeout_s: float
    device: str = "auto"


@dataclass(frozen=True)
class Bench:
    """What was measured; times are those of the slowest rank of each repeat."""

    prediction: Prediction
    times: dict[str, Times]
    faults: dict[str, tuple[str, ...]]
    """What is wrong with the results of a strategy; left out where they were not checked."""
    machine: dict[str, Any]
    repeats: int
    seed: int
    batch: int

    @property
    def wrong(self) -> tuple[str, ...]:
        """What is wrong, with the strategy's name."""
        return tuple(f"{name}: {fault}" for name, some in self.faults.items() for fault in some)

    def median(self, name: str) -> tuple[float, float]:
        """Median seconds of (forward, forward and backward)."""
        forward, both = zip(*self.times[name], strict=True)
        return statistics.median(forward), statistics.median(both)

    def facts(self) -> dict[str, Any]:
        """What `--json` prints: ratios first; every repeat; seconds."""
        medians = {name: self.median(name) for name in self.times}
        best = min(both for _, both in medians.values())
        rows = {row.name: row for row in self.prediction.rows}
        return {
            "over_best": {name: both / best for name, (_, both) in medians.items()},
            "measured_over_predicted": {
                name: both / rows[name].simulation.makespan_s for name, (_, both) in medians.items()
            },
            "forward_s": {name: forward for name, (forward, _) in medians.items()},
            "forward_backward_s": {name: both for name, (_, both) in medians.items()},
            "predicted_forward_s": {
                name: rows[name].simulation.forward.makespan_s for name in medians
            },
            "predicted_forward_backward_s": {
                name: rows[name].simulation.makespan_s for name in medians
            },
            "right": {name: not some for name, some in self.faults.items()},
            "repeats_s": self.times,
            "refused": self.prediction.refused,
            "problem": dataclasses.asdict(self.prediction.auto.plan.problem),
            "ranks": self.prediction.auto.plan.ranks,
            "batch": self.batch,
            "seed": self.seed,
            "digests": {name: rows[name].plan.digest for name in medians},
            "cluster": self.prediction.auto.simulation.cluster,
            "machine": self.machine,
            "command": shlex.join(["ultraattn", *sys.argv[1:]]),
        }


def bench(job: BenchJob, steps: Steps) -> Bench | None:
    """Plans, checks and times; None on the ranks of torchrun but the first.

    Raises:
        InputError: an option cannot be served.
        RunError: a rank failed, died or hung.
    """
    if job.batch < 1 or job.repeats < 1:
        raise InputError(
            f"--batch {job.batch}, --repeats {job.repeats}: expected at least 1 of each"
        )
    _, data = read_text(job.text)
    if started_by_torchrun():
        return _bench_joined(job, data, steps)
    prediction = _predict(job, len(data), None, "cpu", steps)
    plans = {row.name: row.plan for row in prediction.rows}
    with steps.step("import torch"):
        from ultraattn.cli.layer import Text
        from ultraattn.cli.worker import time_plans, work
        from ultraattn.runtime.local import LocalRanks
    text = Text(data, job.batch, job.seed)
    with LocalRanks(prediction.auto.plan.ranks, timeout_s=job.timeout_s) as ranks:
        faults = _checked(plans, text, steps, lambda plan: ranks.run(work, dumps(plan), text))
        with steps.step(f"time {len(plans)} strategies, {job.repeats} repeats each, in turns"):
            texts = {name: dumps(plan) for name, plan in plans.items()}
            by_rank = ranks.run(time_plans, texts, text, job.repeats)
    return _found(job, prediction, by_rank, faults, machine("cpu"))


def _bench_joined(job: BenchJob, data: bytes, steps: Steps) -> Bench | None:
    """As `bench`, on one of the processes that torchrun started: rank 0 plans for all."""
    import torch.distributed as dist

    from ultraattn.cli.layer import Text
    from ultraattn.cli.worker import run_rank, time_rank

    text = Text(data, job.batch, job.seed)
    with torchrun_group(job.timeout_s, job.device) as device:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        prediction, error = None, None
        if rank == 0:
            try:
                prediction = _predict(job, len(data), ranks, device.type, steps)
            except Exception as caught:
                error = caught
        shared: list[Any] = [prediction and {row.name: dumps(row.plan) for row in prediction.rows}]
        dist.broadcast_object_list(shared)
        if shared[0] is None:
            raise error or RunError(f"rank {rank}: rank 0 could not plan; see its error")
        plans = {name: loads(data) for name, data in shared[0].items()}

        def everywhere(plan: Plan) -> Sequence[RankResult]:
            gathered: list[Any] | None = [None] * ranks if rank == 0 else None
            dist.gather_object(run_rank(plan, text, device), gathered)
            return gathered or ()

        faults = _checked(plans, text, steps, everywhere, judging=rank == 0)
        with steps.step(f"time {len(plans)} strategies, {job.repeats} repeats each, in turns"):
            times = time_rank(plans, text, job.repeats, device)
        by_rank: list[Any] | None = [None] * ranks if rank == 0 else None
        dist.gather_object(times, by_rank)
        if prediction is None or by_rank is None:
            return None
        return _found(job, prediction, by_rank, faults, machine(device.type))


def _predict(
    job: BenchJob, text_bytes: int, ranks: int | None, device: str, steps: Steps
) -> Prediction:
    options = job.options
    if options.seqlen is None and options.mask != "document":
        options = dataclasses.replace(options, seqlen=str(min(text_bytes, DEFAULTS["seqlen"])))
    if device == "cuda" and options.cluster is None:
        options = dataclasses.replace(options, cluster=_preset())
    found = predict(options, steps, ranks)
    planned = found.auto.plan.ranks
    if ranks is not None and planned != ranks:
        raise InputError(
            f"plans for {planned} ranks under torchrun with {ranks} processes; start as many, or "
            "leave out --ranks"
        )
    return found


def _preset() -> str:
    """The preset of this GPU; h100 for one that has none."""
    import torch

    name = torch.cuda.get_device_name().lower()
    return next((preset for preset in ("h200", "h800", "a800") if preset in name), "h100")


def _checked(
    plans: dict[str, Plan],
    text: Text,
    steps: Steps,
    run: Callable[[Plan], Sequence[RankResult]],
    judging: bool = True,
) -> dict[str, tuple[str, ...]]:
    """Runs each plan once; what is wrong with each, beside dense attention, where it is not too
    long for that."""
    problem = next(iter(plans.values())).problem
    pairs = problem.q_len * problem.kv_len * problem.heads * text.batch
    if pairs > MOST_PAIRS:
        return {}
    judge = _judge(next(iter(plans.values())), text, steps) if judging else None
    faults = {}
    for name, plan in plans.items():
        with steps.step(f"check {name}"):
            results = run(plan)
            if judge is not None:
                ordered = sorted(results, key=lambda result: result.rank)
                faults[name] = tuple(judge.verdict(joined(plan, ordered)).faults)
    return faults


def _judge(plan: Plan, text: Text, steps: Steps) -> Judge:
    from ultraattn.cli.compare import Judge
    from ultraattn.cli.layer import inputs
    from ultraattn.runtime.attention import mask_of

    problem = plan.problem
    with steps.step("dense attention in float64 on one process"):
        whole = inputs(problem, text, np.arange(problem.q_len), np.arange(problem.kv_len))
        return Judge(problem, mask_of(plan, None), whole)


def _found(
    job: BenchJob,
    prediction: Prediction,
    by_rank: Sequence[dict[str, Times]],
    faults: dict[str, tuple[str, ...]],
    where: dict[str, Any],
) -> Bench:
    times = {
        name: [
            (max(forward for forward, _ in turn), max(both for _, both in turn))
            for turn in zip(*(rank[name] for rank in by_rank), strict=True)
        ]
        for name in by_rank[0]
    }
    return Bench(prediction, times, faults, where, job.repeats, job.seed, job.batch)


def machine(device: str) -> dict[str, Any]:
    """What the figures were measured on."""
    import torch

    found: dict[str, Any] = {
        "system": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "ultraattn": __version__,
    }
    if device == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    return found


def write_json(facts: dict[str, Any], path: Path) -> None:
    """Writes a JSON file; says what to do where that fails."""
    try:
        path.write_text(json.dumps(facts, indent=1) + "\n")
    except OSError as error:
        raise InputError(
            f"--out {path}: {reason(error)}; name a file in a folder that exists and can be "
            "written to"
        ) from None


def bench_table(found: Bench) -> Table:
    """A row a strategy, the fastest first; a prediction stands beside each measurement."""
    plan = found.prediction.auto.plan
    problem = plan.problem
    title = (
        f"{problem.mask_label}: {problem.q_len:,} tokens, {plan.ranks} ranks, ms, median of "
        f"{found.repeats} (slowest rank)"
    )
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for column in ("strategy", "layout"):
        table.add_column(column, no_wrap=True)
    for column in ("x best", "forward", "predicted", "both", "predicted", "result"):
        table.add_column(column, justify="right", no_wrap=True)
    medians = {name: found.median(name) for name in found.times}
    least = min(both for _, both in medians.values())
    for row in sorted(found.prediction.rows, key=lambda row: medians[row.name][1]):
        forward, both = medians[row.name]
        result = "not checked"
        if row.name in found.faults:
            result = "[red]wrong[/red]" if found.faults[row.name] else "[green]right[/green]"
        table.add_row(
            row.name,
            row.plan.layout.name,
            f"{both / least:.2f}",
            f"{forward * 1e3:.2f}",
            f"{row.simulation.forward.makespan_s * 1e3:.2f}",
            f"{both * 1e3:.2f}",
            f"{row.simulation.makespan_s * 1e3:.2f}",
            result,
            style="bold" if row.name == "auto" else None,
        )
    return table


def bench_notes(found: Bench) -> tuple[str, ...]:
    """What stands under the table."""
    notes = list(found.prediction.notes)
    if not found.faults:
        notes.append(
            f"results were not checked: more than {MOST_PAIRS:,} pairs; a shorter --seqlen is"
        )
    return tuple(notes)
