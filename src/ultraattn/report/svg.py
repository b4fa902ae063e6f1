"""Draws the attention matrix of a pass as SVG: blocks by rank, bands in their true shape."""

from __future__ import annotations

from html import escape

from ultraattn.masks.grid import BlockKind
from ultraattn.plans import Plan
from ultraattn.plans.check import Pass
from ultraattn.report.matrix import Matrix, colour, kind_of, matrices

Point = tuple[float, float]
INK, FAINT = "#57606a", "#d0d7de"


def picture(plan: Plan, pass_: Pass, side: float = 320.0) -> str:
    """A whole SVG file: the matrix of the first head range, and a legend of ranks."""
    matrix = matrices(plan, pass_)[0]
    width, height = side + 40, side + 84
    title = f"{plan.problem.mask_label}, {pass_}: {plan.forward.strategy}, {plan.ranks} ranks"
    body = [
        label(20, 22, title, 13, "600"),
        f'<g transform="translate(20 34)">{matrix_svg(matrix, side)}</g>',
        label(20, side + 50, "queries down, keys across", 11),
        *legend(plan.ranks, 20, side + 60, side),
    ]
    return document(width, height, body)


def document(width: float, height: float, body: list[str]) -> str:
    """An SVG file with a white ground."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" font-family="system-ui, sans-serif">\n'
        f'<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def label(
    x: float, y: float, text: str, points: float, weight: str = "400", anchor: str = "start"
) -> str:
    """A line of text."""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{points:g}" font-weight="{weight}" '
        f'text-anchor="{anchor}" fill="{INK}">{escape(text)}</text>'
    )


def legend(ranks: int, x: float, y: float, width: float, most: int = 16) -> list[str]:
    """A coloured square and a number for each of the first ranks."""
    step = min(40.0, width / min(ranks, most))
    parts = []
    for rank in range(min(ranks, most)):
        at = x + rank * step
        parts.append(
            f'<rect x="{at:g}" y="{y:g}" width="10" height="10" rx="2" fill="{colour(rank)}"/>'
        )
        parts.append(label(at + 13, y + 9, str(rank), 10))
    return parts


def matrix_svg(matrix: Matrix, side: float) -> str:
    """The matrix in a square of `side` points, its origin at the upper left."""
    rows, cols = matrix.rank.shape
    height, width = side / rows, side / cols
    parts = [f'<rect width="{side:g}" height="{side:g}" fill="#f6f8fa" stroke="{FAINT}"/>']
    for row in range(rows):
        for col, rank in enumerate(matrix.rank[row].tolist()):
            if rank < 0:
                continue
            kind = kind_of(matrix, row, col)
            shape = _shape(matrix, row, col, kind)
            points = " ".join(
                f"{round((col + x) * width, 2):g},{round((row + y) * height, 2):g}"
                for x, y in shape
            )
            faint = ' fill-opacity="0.55"' if kind is BlockKind.PARTIAL else ""
            parts.append(
                f'<polygon points="{points}" fill="{colour(rank)}"{faint} stroke="#ffffff" '
                f'stroke-width="{min(1.0, width / 12):.2g}"><title>rank {rank}, row {row}, column '
                f"{col}, {kind}, {int(matrix.weight[row, col]):,} pairs</title></polygon>"
            )
    return "\n".join(parts)


def _shape(matrix: Matrix, row: int, col: int, kind: BlockKind) -> list[Point]:
    """The corners of a block's visible part, the block being the unit square (x keys, y queries).

    A band is where ``lo <= y * queries - x * keys <= hi``, give or take half a token.
    """
    square: list[Point] = [(0.0, 0.0), (1.0, 0.0), (1.0, 1.0), (0.0, 1.0)]
    if kind is not BlockKind.BAND:
        return square
    queries, keys = int(matrix.rows[row]), int(matrix.cols[col])
    lo, hi = int(matrix.lo[row, col]), int(matrix.hi[row, col])
    above = _cut(square, -keys, queries, -(max(lo, -keys) - 0.5))
    return _cut(above, keys, -queries, min(hi, queries) + 0.5) or square


def _cut(corners: list[Point], a: float, b: float, c: float) -> list[Point]:
    """The part of a convex polygon where ``a x + b y + c >= 0``."""
    kept: list[Point] = []
    for (x0, y0), (x1, y1) in zip(corners, corners[1:] + corners[:1], strict=True):
        d0, d1 = a * x0 + b * y0 + c, a * x1 + b * y1 + c
        if d0 >= 0:
            kept.append((x0, y0))
        if (d0 < 0) != (d1 < 0):
            t = d0 / (d0 - d1)
            kept.append((x0 + t * (x1 - x0), y0 + t * (y1 - y0)))
    return kept
