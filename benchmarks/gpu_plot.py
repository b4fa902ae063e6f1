"""Draws what was measured on GPUs: ours and the best peer, as multiples of the ideal.

    python benchmarks/gpu_plot.py benchmarks/results/gpu_dense_2.json \\
        benchmarks/results/gpu_sparse_2.json --out docs/gpu.svg

Reads results of `gpu.py peers`; where two files hold the same cell, the later one counts. A row a
cell, in the order of the files; where a peer is faster the row is drawn in red. Needs matplotlib
(the extra `plots`).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

PASSES = (("forward", "forward"), ("forward_backward", "forward plus backward"))
MASKS = {"window": "sliding window"}


def cells_of(paths: list[Path]) -> list[dict[str, Any]]:
    """The cells that have ours and a peer, once each."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for path in paths:
        for cell in json.loads(path.read_text())["cells"]:
            if any(len(cell.get(name, {}).get("over_ideal", ())) > 1 for name, _ in PASSES):
                found[cell["mask"], cell["tokens"], cell["heads"], cell["kv_heads"]] = cell
    return list(found.values())


def label(cell: dict[str, Any]) -> str:
    """A cell's name, as in "causal, 8k, 32/8 heads"."""
    heads = f"{cell['heads']}/{cell['kv_heads']}"
    return f"{MASKS.get(cell['mask'], cell['mask'])}, {cell['tokens'] >> 10}k, {heads} heads"


def draw(cells: list[dict[str, Any]], out: Path) -> None:
    """Writes the picture."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "ultraattn"
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        1, 2, figsize=(9.5, 1.3 + 0.27 * len(cells)), sharey=True, layout="constrained"
    )
    rows = range(len(cells))
    for axis, (name, title) in zip(panels, PASSES, strict=True):
        for row, cell in zip(rows, cells, strict=True):
            over = cell[name]["over_ideal"]
            ours = over["ours"]
            peer = min(ratio for who, ratio in over.items() if not who.startswith("ours"))
            colour = "tab:blue" if ours <= peer else "tab:red"
            axis.plot([ours, peer], [row, row], color=colour, linewidth=1, alpha=0.5, zorder=1)
            axis.scatter([ours], [row], color=colour, s=34, zorder=3)
            axis.scatter([peer], [row], facecolor="white", edgecolor="grey", s=34, zorder=2)
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set_xscale("log", base=2)
        ticks = [0.75, 1, 1.5, 2, 3, 4, 6, 8]
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.set_xticks([], minor=True)
        axis.set_xlabel("time over the ideal (1: half of one GPU's)")
        axis.set_title(title)
        axis.grid(axis="x", linewidth=0.3)
    panels[0].set_yticks(list(rows), [label(cell) for cell in cells])
    panels[0].invert_yaxis()
    marks = [
        pyplot.Line2D([], [], marker="o", linestyle="", color="tab:blue", label="ours"),
        pyplot.Line2D([], [], marker="o", linestyle="", color="tab:red", label="ours, slower"),
        pyplot.Line2D([], [], marker="o", linestyle="", markerfacecolor="white", color="grey",
                      label="PyTorch's best context parallelism"),
    ]  # fmt: skip
    figure.legend(handles=marks, loc="outside upper center", ncols=3, frameon=False)
    figure.savefig(out, metadata={"Date": None})


def main() -> None:
    """Reads options and draws."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    draw(cells_of(args.files), args.out)


if __name__ == "__main__":
    main()
