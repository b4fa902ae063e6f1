"""Turns the report of a run into tables: work, traffic and seconds by rank, errors and limits."""

from __future__ import annotations

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ultraattn.cli.run import Report
from ultraattn.plans.check import Pass
from ultraattn.report.matrix import colour
from ultraattn.report.terminal import over_mean, size


def run_tables(report: Report) -> tuple[RenderableType, ...]:
    """What `ultraattn run` ends with."""
    verdict = Text("wrong", "bold red") if report.faults else Text("right", "bold green")
    summary = Text(f"\n{report.plan.summary()}\ninput: {report.text_name}, batch {report.batch}\n")
    last = Text("The distributed result is ") + verdict
    last.append(": out, dQ, dK, dV beside dense attention, bytes counted beside bytes planned.")
    return summary, *(_ranks(report, pass_) for pass_ in Pass), _errors(report), last


def _ranks(report: Report, pass_: Pass) -> Table:
    title = f"{pass_} by rank (traffic as planned, and as counted)"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for name in ("rank", "tokens", "work", "sent", "counted", "received", "counted", "s"):
        table.add_column(name, justify="right", no_wrap=True)
    plan, index = report.plan, tuple(Pass).index(pass_)
    load = plan.account(pass_).load
    for result, planned in zip(report.results, report.planned(pass_), strict=True):
        rank = result.rank
        table.add_row(
            Text(str(rank), colour(rank)),
            f"{plan.q_layout.local_tokens(rank):,}",
            over_mean(int(load[rank]), int(load.sum()), plan.ranks),
            size(planned[0]),
            _counted(planned[0], result.sent[index]),
            size(planned[1]),
            _counted(planned[1], result.received[index]),
            f"{result.seconds[index]:.3f}",
        )
    return table


def _counted(planned: int, counted: int) -> Text:
    return Text("same", "green") if planned == counted else Text(f"{counted:,} B", "bold red")


def _errors(report: Report) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="errors beside dense attention", title_justify="left")
    for name in ("tensor", "error", "limit", "largest", "limit", ""):
        table.add_column(name, justify="left" if name in ("tensor", "") else "right")
    errors, limits = report.verdict.errors, report.verdict.limits
    for name in errors.norm:
        pairs = [(errors.norm[name], limits.norm[name]), (errors.single[name], limits.single[name])]
        # Written so that a NaN is not well.
        well = all(error <= limit for error, limit in pairs)
        mark = Text("ok", "green") if well else Text("too large", "bold red")
        table.add_row(name, *(f"{figure:.2e}" for pair in pairs for figure in pair), mark)
    return table
