"""Turns a plan into one self-contained HTML page: matrix, loads, traffic, tasks in order."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from ultraattn.plans import Plan
from ultraattn.plans.check import Pass
from ultraattn.plans.program import TASK_ORDER, TaskKind
from ultraattn.report.matrix import colour, matrices
from ultraattn.report.svg import FAINT, label, matrix_svg
from ultraattn.report.terminal import size

MOST_TASKS = 3000
MOST_MATRICES = 4
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #24292f; margin: 2rem auto; max-width: 68rem;
       padding: 0 1rem; }
h1 { font-size: 1.4rem } h2 { font-size: 1.15rem; margin-top: 2.2rem; text-transform: capitalize }
h3 { font-size: 1rem } pre { background: #f6f8fa; padding: .8rem 1rem; overflow-x: auto }
figure { display: inline-block; margin: 0 1.5rem 1rem 0; vertical-align: top }
figcaption { color: #57606a; font-size: .85rem } svg { max-width: 100%; height: auto }
"""
KIND_OPACITY = {
    TaskKind.COMPUTE: 1.0,
    TaskKind.TRANSFER: 0.45,
    TaskKind.COLLECTIVE: 0.45,
    TaskKind.MERGE: 0.75,
    TaskKind.LOCAL: 0.25,
}


def page(plan: Plan) -> str:
    """The whole page."""
    title = f"{plan.problem.mask_label} over {plan.ranks} ranks"
    body = [f"<h1>{escape(title)}</h1>", f"<pre>{escape(plan.summary())}</pre>"]
    for pass_ in Pass:
        body += [f"<h2>{pass_}</h2>", *_pass(plan, pass_)]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _pass(plan: Plan, pass_: Pass) -> Iterable[str]:
    found = matrices(plan, pass_)
    for matrix in found[:MOST_MATRICES]:
        side = matrix.blocks_a_side
        each = "a block" if side == 1 else f"{side} x {side} blocks, by the rank with most of it"
        yield _figure(
            340,
            340,
            matrix_svg(matrix, 340),
            f"Heads {matrix.head_start} to {matrix.head_stop - 1}: queries down, keys across, in "
            f"the order of the layout; a cell is {each}.",
        )
    costs = plan.account(pass_)
    yield _bars(
        "Work by rank, in visible (query, key) pairs times heads",
        {"work": costs.load.tolist()},
        plan.ranks,
        lambda value: f"{value:,}",
    )
    yield _bars(
        "Traffic by rank, in bytes for one batch entry: sent, then received",
        {"sent": costs.sent.tolist(), "received": costs.received.tolist()},
        plan.ranks,
        size,
    )
    yield _timeline(plan, pass_)


def _figure(width: float, height: float, inner: str, caption: str) -> str:
    return (
        f'<figure><svg viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}">'
        f"{inner}</svg><figcaption>{escape(caption)}</figcaption></figure>"
    )


def _bars(caption: str, series: dict[str, list[int]], ranks: int, say: object) -> str:
    """Horizontal bars, one a rank and series, with their values."""
    assert callable(say)
    thick = 16.0 if ranks <= 16 else 8.0
    greatest = max(1, *(max(values, default=0) for values in series.values()))
    parts, y = [], 0.0
    for rank in range(ranks):
        for index, (name, values) in enumerate(series.items()):
            wide = 300 * values[rank] / greatest
            parts.append(
                f'<rect x="34" y="{y + 1:g}" width="{wide:.2f}" height="{thick - 2:g}" '
                f'fill="{colour(rank)}" fill-opacity="{1 - 0.45 * index:g}">'
                f"<title>rank {rank} {name}: {values[rank]:,}</title></rect>"
            )
            parts.append(label(40 + wide, y + thick - 4, say(values[rank]), thick - 5))
            y += thick
        parts.append(label(28, y - thick * len(series) / 2 + 4, str(rank), 9, anchor="end"))
        y += 4 if len(series) > 1 else 0
    return _figure(430, y, "".join(parts), caption)


def _timeline(plan: Plan, pass_: Pass) -> str:
    """Every task in its place in the order of issue, on the lanes of its ranks."""
    program = plan.pass_plan(pass_).program
    count = len(program.tasks.rank)
    if count > MOST_TASKS:
        return f"<p>{count:,} tasks; their order is drawn up to {MOST_TASKS:,}.</p>"
    lane, width = 16.0, 1000.0
    step = width / max(1, count)
    parts = [
        f'<line x1="30" x2="{width + 30:g}" y1="{(rank + 0.5) * lane:g}" '
        f'y2="{(rank + 0.5) * lane:g}" stroke="{FAINT}"/>'
        + label(24, (rank + 0.75) * lane, str(rank), 9, anchor="end")
        for rank in range(plan.ranks)
    ]
    for task in program.task_views:
        kind = TASK_ORDER[int(program.tasks.kind[task.index])]
        x = 30 + task.index * step
        ranks = list(program.ranks_of(task))
        for rank in ranks:
            parts.append(
                f'<rect x="{x:.2f}" y="{rank * lane + 2:g}" width="{max(step, 0.6):.2f}" '
                f'height="{lane - 4:g}" fill="{colour(task.rank)}" '
                f'fill-opacity="{KIND_OPACITY[kind]:g}"><title>task {task.index}: {kind}, ranks '
                f"{', '.join(map(str, ranks))}</title></rect>"
            )
    return _figure(
        width + 40,
        plan.ranks * lane,
        "".join(parts),
        f"{count:,} tasks in order of issue (not to scale in time), on the lanes of the ranks that "
        "take part. Solid: compute; lighter: merge; light: transfer, in the sender's colour on "
        "both lanes; faint: local.",
    )
