"""Draws docs/problem.svg from two plans of one mask: each rank its own rows, and blocks dealt out.

python docs/picture.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import ultraattn as ua
from ultraattn.plans import Plan
from ultraattn.plans.check import Pass
from ultraattn.report.matrix import matrices
from ultraattn.report.svg import document, label, legend, matrix_svg
from ultraattn.report.terminal import size

SIDE, GAP, LEFT = 250.0, 60.0, 20.0
RANKS = 8


def planned(strategy: str) -> Plan:
    """One plan of the pictured problem."""
    return ua.plan(
        ua.masks.global_local(), seqlen=8192, heads=32, kv_heads=8, head_dim=128, ranks=RANKS,
        chunks=16, layout="contiguous", head_groups=1, strategy=strategy,
    )  # fmt: skip


def panel(plan: Plan, x: float, title: str) -> list[str]:
    """A matrix with its title above and its costs below."""
    costs, matrix = plan.account(Pass.FORWARD), matrices(plan, Pass.FORWARD)[0]
    return [
        label(x, 24, title, 14, "600"),
        f'<g transform="translate({x:g} 36)">{matrix_svg(matrix, SIDE)}</g>',
        label(x, SIDE + 56, f"busiest rank computes {costs.load_over_mean:.2f} x the mean", 12),
        label(x, SIDE + 73, f"busiest rank moves {size(costs.max_volume)}", 12),
    ]


def main() -> None:
    """Writes the picture to the path given, or beside this file."""
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("problem.svg")
    second = LEFT + SIDE + GAP
    body = [
        *panel(planned("rows"), LEFT, "each rank its own rows"),
        *panel(planned("tile"), second, "blocks dealt out by UltraAttn"),
        *legend(RANKS, LEFT, SIDE + 88, SIDE + 70),
    ]
    target.write_text(document(second + SIDE + LEFT, SIDE + 108, body), encoding="utf-8")


if __name__ == "__main__":
    main()
