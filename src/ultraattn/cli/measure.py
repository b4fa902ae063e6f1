"""Measures this machine for `ultraattn profile`, saves the cluster, and lays out what was found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table

from ultraattn.cli.arguments import reason
from ultraattn.cli.steps import Steps
from ultraattn.cluster import Cluster
from ultraattn.errors import InputError


def measure(ranks: int, out: Path, seed: int, quick: bool, steps: Steps) -> Cluster:
    """Measures, and writes the cluster's file.

    Raises:
        InputError: fewer than 2 ranks, or a file that cannot be written.
    """
    if not out.parent.is_dir():
        raise InputError(f"--out {out}: no folder {out.parent}; name a file in one that exists")
    with steps.step("import torch"):
        from ultraattn.profiling.profile import Amount, profile
    small = Amount(
        sides=(16, 64), heads=(1, 2), bytes_=(256, 65536), merge_rows=(16, 512), repeats=3,
        budget_s=0.002,
    )  # fmt: skip
    found = profile(ranks, amount=small if quick else None, seed=seed, step=steps.step)
    try:
        found.save(out)
    except OSError as error:
        raise InputError(f"--out {out}: {reason(error)}; name a file that can be written") from None
    return found


def profile_facts(found: Cluster, out: Path) -> dict[str, Any]:
    """What `--json` prints."""
    costs = found.known_costs
    return {
        "file": str(out),
        "ranks": found.ranks,
        "measured": costs.measured,
        "cores_per_node": costs.cores_per_node,
        "pairs_per_s": {pass_: costs.peak(pass_) for pass_ in ("forward", "backward")},
        "link_start_s": costs.inside.start_s,
        "link_bytes_per_s": costs.inside.bytes_per_s,
        "message_launch_s": costs.inside.launch_s,
        "memory_bytes_per_s": costs.memory_bytes_per_s,
        "merge_start_s": costs.local_start_s,
        "launch_s": costs.launch_s,
        "rate_beside_transfers": costs.rate_beside(costs.inside.transport),
        "dtype_factors": dict(costs.dtype_factors),
        "notes": list(costs.notes),
    }


def profile_tables(found: Cluster) -> tuple[RenderableType, ...]:
    """Kernels by size, and all else."""
    costs = found.known_costs
    kernels = Table(box=box.SIMPLE_HEAD, title="kernels, microseconds", title_justify="left")
    for name in ("q tokens", "kv tokens", "heads", "forward", "causal", "backward", "causal"):
        kernels.add_column(name, justify="right")
    tables = {(t.pass_, t.kind): {r[:3]: r[3] for r in t.rows} for t in costs.kernel().tables}
    for shape in tables["forward", "full"]:
        cells = [
            tables[pass_, kind].get(shape)
            for pass_ in ("forward", "backward")
            for kind in ("full", "causal")
        ]
        kernels.add_row(*map(str, shape), *("" if s is None else f"{s * 1e6:,.0f}" for s in cells))
    rest = Table(box=box.SIMPLE_HEAD, title="all else", title_justify="left")
    rest.add_column("what")
    rest.add_column("measured", justify="right")
    link = costs.inside
    shared = "no" if not costs.cores_per_node else f"{costs.cores_per_node} cores"
    for what, measured in (
        ("message start", f"{link.start_s * 1e6:,.0f} us"),
        ("link", f"{link.bytes_per_s / 1e9:.2f} GB/s"),
        ("issue of a message", f"{link.launch_s * 1e6:,.0f} us"),
        ("merge start", f"{costs.local_start_s * 1e6:,.0f} us"),
        ("merge", f"{costs.memory_bytes_per_s / 1e9:.2f} GB/s"),
        ("launch", f"{costs.launch_s * 1e6:,.0f} us"),
        ("kernel's rate beside a transfer", f"{costs.rate_beside(link.transport):.2f}"),
        ("ranks share cores", shared),
    ):
        rest.add_row(what, measured)
    return kernels, rest
