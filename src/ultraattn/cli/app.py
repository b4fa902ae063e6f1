"""The commands of `ultraattn`: each reads options, calls one stage, and says what came of it."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from ultraattn.cli.arguments import make_plan, plan_of
from ultraattn.cli.options import PlanOptions, takes_options
from ultraattn.cli.steps import Steps
from ultraattn.errors import RunError, UltraAttnError
from ultraattn.plans import Plan

RUN, OUTPUT = "The run", "The output"
WRONG, BAD_INPUT = 1, 2
"""Exit codes: a result is wrong or a run failed; something given cannot be served."""

app = typer.Typer(
    name="ultraattn",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Context-parallel attention for any mask: make a plan, run it, look at it.\n\n"
    "Try first: [bold]ultraattn run[/bold], then [bold]ultraattn show --mask strided --ranks "
    "8[/bold].",
)

FileArgument = Annotated[
    Path | None,
    typer.Argument(metavar="[FILE]", help="A plan's file, in place of the options that make one."),
]
JsonOption = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON object, nothing else.", rich_help_panel=OUTPUT),
]
OutOption = Annotated[
    Path | None,
    typer.Option("--out", metavar="FILE", help="Save the plan there.", rich_help_panel=OUTPUT),
]

TextOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="A file whose bytes are the input. \\[default: the project's README]",
        rich_help_panel=RUN,
    ),
]
BatchOption = Annotated[
    int, typer.Option(help="Sequences, one after another in the text.", rich_help_panel=RUN)
]
SeedOption = Annotated[int, typer.Option(help="Of the random weights.", rich_help_panel=RUN)]
TimeoutOption = Annotated[
    float, typer.Option(help="Most seconds to wait for a rank.", rich_help_panel=RUN)
]
DeviceOption = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Under torchrun: cuda, cpu, or auto (CUDA where each rank has a GPU).",
        rich_help_panel=RUN,
    ),
]


def main() -> None:
    """The entry point: runs a command; an error that a user can meet is one line, not a trace."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    try:
        app()
    except UltraAttnError as error:
        Console(stderr=True).print(
            f"error: {error}", markup=False, highlight=False, soft_wrap=True, style="red"
        )
        raise SystemExit(WRONG if isinstance(error, RunError) else BAD_INPUT) from None


@app.command()
@takes_options
def run(
    options: PlanOptions,
    file: FileArgument = None,
    text: TextOption = None,
    batch: BatchOption = 1,
    seed: SeedOption = 0,
    timeout: TimeoutOption = 600.0,
    device: DeviceOption = "auto",
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Plan, run over local processes, and check against dense attention.

    Makes queries, keys and values of a text in the shape of a Llama layer, runs the plan forward
    and backward over processes of this machine (or joins torchrun's, on their GPUs where there are
    enough), and compares out, dQ, dK and
    dV with dense attention in float64 on one process. Ends with exit code 1 where one is wrong.

    Examples:

        ultraattn run
        ultraattn run --mask sliding_window --window 256 --ranks 3
        ultraattn run --text book.txt --seqlen 4k --mask strided --dtype bfloat16
        torchrun --nproc-per-node 4 -m ultraattn.cli run
    """
    from ultraattn.cli.run import Job
    from ultraattn.cli.run import run as run_job
    from ultraattn.cli.tables import run_tables

    steps = Steps(Console(stderr=True) if _first() else None)
    report = run_job(Job(options, file, text, batch, seed, out, timeout, device), steps)
    if report is None:
        return
    if as_json:
        _print_json(report.facts())
    else:
        console = Console(highlight=False)
        for part in run_tables(report):
            console.print(part, soft_wrap=isinstance(part, Text))
    if report.faults:
        raise RunError("the result is wrong: " + "; ".join(report.faults))


@app.command()
@takes_options
def plan(options: PlanOptions, out: OutOption = None, as_json: JsonOption = False) -> None:
    """Make a plan, and save it.

    Needs no GPU, no process group and no torch.

    Examples:

        ultraattn plan --mask causal --ranks 8 --seqlen 64k --out plan.json
        ultraattn plan --mask document --lengths 137,45,89 --ranks 4
        ultraattn plan --mask causal --seqlen 1m --heads 32 --kv-heads 8 --ranks 64 --json
    """
    made, planning_s = make_plan(options)
    _save(made, out)
    if as_json:
        _print_json({**made.facts(), "planning_s": planning_s})
        return
    where = f"saved as {out}" if out else "not saved (--out FILE saves it)"
    console = Console()
    console.print(made.summary(), highlight=False, markup=False, soft_wrap=True)
    console.print(f"planned in {planning_s:.2f} s, {where}", highlight=False, soft_wrap=True)


@app.command()
@takes_options
def show(
    options: PlanOptions,
    file: FileArgument = None,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write an HTML page (or .svg).", rich_help_panel=OUTPUT),
    ] = None,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print or draw a plan.

    Draws the attention matrix coloured by rank, and what each rank computes, sends and keeps.

    Examples:

        ultraattn show plan.json
        ultraattn show --mask strided --ranks 4 --html strided.html
        ultraattn show --mask star --ranks 8 --json
    """
    from ultraattn.plans.check import Pass
    from ultraattn.report import report
    from ultraattn.report.terminal import drawing, rank_table

    made = plan_of(options, file)
    _save(made, out)
    if html is not None:
        report(made, html)
    if as_json:
        _print_json(made.facts())
        return
    console = Console()
    console.print(made.summary(), highlight=False, markup=False, soft_wrap=True)
    for pass_ in Pass:
        console.print(drawing(made, pass_), soft_wrap=True)
        console.print(rank_table(made, pass_))
    if html is not None:
        console.print(f"drawn in {html}", highlight=False, soft_wrap=True)


@app.command()
@takes_options
def simulate(options: PlanOptions, as_json: JsonOption = False) -> None:
    """Predict every strategy in simulated time.

    Plans the same attention by this system (auto, tile, rows) and by every rival in the layout
    that its authors use, and simulates each on the cluster: forward, backward, and both. A
    strategy that cannot serve the shape is listed with the reason. --strategy names one to compare
    with auto alone.

    Examples:

        ultraattn simulate --mask causal --seqlen 64k --heads 32 --kv-heads 8 --cluster h100 \\
            --ranks 8
        ultraattn simulate --mask sliding_window --window 4096 --cluster h200 --ranks 8 --json
    """
    from ultraattn.cli.predict import predict, prediction_table

    found = predict(options, Steps(Console(stderr=True)))
    if as_json:
        _print_json(found.facts())
        return
    console = Console(highlight=False)
    console.print(prediction_table(found))
    for note in found.notes:
        console.print(note, markup=False, soft_wrap=True)


@app.command()
@takes_options
def bench(
    options: PlanOptions,
    repeats: Annotated[
        int, typer.Option(help="Timed rounds, after one that is not.", rich_help_panel=RUN)
    ] = 5,
    text: TextOption = None,
    batch: BatchOption = 1,
    seed: SeedOption = 0,
    timeout: TimeoutOption = 600.0,
    device: DeviceOption = "auto",
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Save the JSON.", rich_help_panel=OUTPUT),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Time every strategy on this machine, beside its prediction.

    Plans as [bold]simulate[/bold] does, runs each plan over local processes (or torchrun's, on
    their GPUs where there are enough), holds each result against dense attention first, and times
    all in turns. Ends with exit code 1 where a result is wrong. Best on an idle machine.

    Examples:

        ultraattn bench --mask causal --ranks 2
        ultraattn bench --mask star --seqlen 4k --cluster here.json --ranks 2 --out star.json
        torchrun --nproc-per-node 2 -m ultraattn.cli bench --dtype bfloat16 --head-dim 128
    """
    from ultraattn.cli.bench import BenchJob, bench_notes, bench_table, write_json
    from ultraattn.cli.bench import bench as run_bench

    steps = Steps(Console(stderr=True) if _first() else None)
    job = BenchJob(options, text, batch, seed, repeats, timeout, device)
    found = run_bench(job, steps)
    if found is None:
        return
    if out is not None:
        write_json(found.facts(), out)
    if as_json:
        _print_json(found.facts())
    else:
        console = Console(highlight=False)
        console.print(bench_table(found))
        for note in bench_notes(found):
            console.print(note, markup=False, soft_wrap=True)
    if found.wrong:
        raise RunError("a result is wrong: " + "; ".join(found.wrong))


@app.command()
def profile(
    ranks: Annotated[int, typer.Option(help="Local processes, as in the runs to come.")] = 2,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The cluster's file.")] = Path(
        "cluster.json"
    ),
    seed: Annotated[int, typer.Option(help="Of the random inputs.")] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer and smaller shapes: seconds, for a first look.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure this machine, for --cluster FILE.

    Starts local processes and times kernels (forward and backward, by size), messages over gloo by
    bytes, merges, transfers beside kernels, and how ranks share cores. Takes a minute or two; best
    on an idle machine.

    Examples:

        ultraattn profile --ranks 4 --out here.json
        ultraattn simulate --cluster here.json --ranks 4
    """
    from ultraattn.cli.measure import measure, profile_facts, profile_tables

    found = measure(ranks, out, seed, quick, Steps(Console(stderr=True)))
    if as_json:
        _print_json(profile_facts(found, out))
        return
    console = Console(highlight=False)
    for part in profile_tables(found):
        console.print(part)
    console.print(f"saved as {out}: pass --cluster {out}", soft_wrap=True)


def _first() -> bool:
    """Whether this is the only process, or the first of torchrun's."""
    return os.environ.get("RANK", "0") == "0"


def _save(made: Plan, out: Path | None) -> None:
    if out is not None:
        from ultraattn.cli.run import save

        save(made, out)


def _print_json(facts: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(facts, indent=2) + "\n")
