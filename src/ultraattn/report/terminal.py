"""Draws a plan in the terminal: the attention matrix coloured by rank, and what each rank does."""

from __future__ import annotations

from rich import box
from rich.table import Table
from rich.text import Text

from ultraattn.masks.grid import BlockKind
from ultraattn.plans import Plan
from ultraattn.plans.check import Pass
from ultraattn.report.matrix import Matrix, colour, glyph, kind_of, matrices

SECOND = {BlockKind.FULL: "", BlockKind.BAND: "╲", BlockKind.PARTIAL: "░"}
"""What stands beside a rank's glyph; a full block shows the glyph twice."""


def drawing(plan: Plan, pass_: Pass = Pass.FORWARD, most: int = 36) -> Text:
    """Queries down, keys across, two characters a cell: the rank, and the kind of its block."""
    text = Text()
    for matrix, ranges in _distinct(matrices(plan, pass_, most)):
        heads = f", heads {', '.join(ranges)}" if ranges != [f"0:{plan.problem.heads}"] else ""
        side = matrix.blocks_a_side
        each = "a block" if side == 1 else f"{side} x {side} blocks (the rank with most of it)"
        text.append(f"{pass_}{heads}: queries down, keys across, a cell is {each}\n", "bold")
        _draw(text, matrix)
    text.append("the character is the rank;  00 full block  0╲ band  0░ other  ·· nothing", "dim")
    return text


def _distinct(found: tuple[Matrix, ...], most: int = 4) -> list[tuple[Matrix, list[str]]]:
    """The matrices that differ in their ranks, the first few, each with all its head ranges."""
    kept: list[tuple[Matrix, list[str]]] = []
    for matrix in found:
        name = f"{matrix.head_start}:{matrix.head_stop}"
        same = [ranges for other, ranges in kept if (matrix.rank == other.rank).all()]
        if same:
            same[0].append(name)
        else:
            kept.append((matrix, [name]))
    return kept[:most]


def _draw(text: Text, matrix: Matrix) -> None:
    rows, cols = matrix.rank.shape
    rule = "─" * (2 * cols)
    text.append(f"┌{rule}┐\n", "dim")
    for row in range(rows):
        text.append("│", "dim")
        for col, rank in enumerate(matrix.rank[row].tolist()):
            if rank < 0:
                text.append("··", "dim")
                continue
            kind = kind_of(matrix, row, col)
            mark = glyph(rank)
            text.append(mark + (SECOND[kind] or mark), f"black on {colour(rank)}")
        text.append("│\n", "dim")
    text.append(f"└{rule}┘\n", "dim")


def rank_table(plan: Plan, pass_: Pass = Pass.FORWARD, most: int = 32) -> Table:
    """What each rank owns, computes, sends, receives and keeps, for one batch entry."""
    title = f"{pass_}, for one batch entry"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for name in ("rank", "node", "tokens", "work", "sent", "received", "buffers"):
        table.add_column(name, justify="right", no_wrap=True)
    costs, total = plan.account(pass_), int(plan.account(pass_).load.sum())
    for rank in range(min(plan.ranks, most)):
        table.add_row(
            Text(str(rank), colour(rank)),
            str(plan.place.node_of[rank]),
            f"{plan.q_layout.local_tokens(rank):,}",
            over_mean(int(costs.load[rank]), total, plan.ranks),
            size(int(costs.sent[rank])),
            size(int(costs.received[rank])),
            size(int(costs.memory[rank])),
        )
    if plan.ranks > most:
        table.add_row("...", "", f"{plan.ranks - most} more")
    return table


def over_mean(load: int, total: int, ranks: int) -> str:
    """A rank's work over the mean, as ``1.05 x``."""
    return f"{load * ranks / total:.2f} x" if total else "-"


def size(count: int) -> str:
    """Bytes for a person.

    >>> size(0), size(1500), size(3 << 20)
    ('0 B', '1.5 KiB', '3.0 MiB')
    """
    if count < 1024:
        return f"{count} B"
    units = ("KiB", "MiB", "GiB", "TiB")
    power = min(len(units), (count.bit_length() - 1) // 10)
    return f"{count / 1024**power:.1f} {units[power - 1]}"
