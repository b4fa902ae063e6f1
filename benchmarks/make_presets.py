"""Turns measured tables of kernels and links into the clusters that come with the package.

    python benchmarks/make_presets.py MEASURED_DIRECTORY src/ultraattn/cluster/presets

The directory holds measured_a800.json, measured_h800.json, measured_h100.json and
measured_h200.json. What was not measured is derived by a rule that the preset's notes state.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from ultraattn.cluster import Cluster, Costs, Kernel, KernelTable, Link

PASSES = ("forward", "backward")
FLOPS = {"forward": 4, "backward": 10}
"""Per pair, head and element of head_dim."""


def published(data: dict[str, Any], rates: dict[str, float]) -> Cluster:
    """a800, h800, h100: FlashAttention-2 and NCCL tables."""
    rows = data["kernels"]["rows"]
    tables = tuple(
        KernelTable(
            pass_,
            kind,
            tuple((q, kv, h, row[at] / 1e6) for q, kv, h, c, *row in rows if c == causal),
        )
        for at, pass_ in enumerate(PASSES)
        for causal, kind in enumerate(("full", "causal"))
    )
    links = {
        name: Link(transport, launch, tuple((size, size / rate / 1e9) for size, rate in found))
        for (name, found), transport, launch in zip(
            sorted(data["links"].items(), reverse=True),
            ("copy_engine", "nccl_network"),
            (10e-6, 45e-6),
            strict=True,
        )
    }
    ampere = data["gpu"] == "A800"
    name = data["gpu"].lower()
    return Cluster(
        name,
        1,
        data["gpus_per_node"],
        align=128,
        costs=Costs(
            head_dim=data["head_dim"],
            dtype=data["dtype"],
            dtype_factors=(("float16", 1.0), ("float32", 15.0), ("float64", 16.0)),
            kernels=(Kernel("fa2", False, 1.0, tables),),
            inside=links["intra"],
            between=links["inter"],
            nics_per_node=8,
            memory_bytes_per_s=1.6e12 if ampere else 2.7e12,
            local_start_s=5e-6,
            launch_s=30e-6,
            compute_rate=tuple(sorted(rates.items())),
            host_serial=False,
            cores_per_node=0,
            measured=True,
            notes=(
                f"Kernels and links: {data['source']}.",
                "Assumed: PARTIAL blocks cost as FULL ones by visible pair; merges run at 80 % of "
                "the data sheet's memory bandwidth; float32 and float64 by peak rates.",
                "Assumed: inside a node the copy engine moves bytes no slower than NCCL, whose "
                "rates these are. It and NCCL inside a node (change the transport to nccl) slow "
                "kernels as measured on the h200; NCCL between nodes leaves them 0.9 of their "
                "speed. Host launches as on the h200.",
            ),
        ),
    )


def rates_beside(data: dict[str, Any]) -> dict[str, float]:
    """How fast kernels run beside each transport; NCCL between nodes is assumed."""
    o = data["overlap_ms"]
    return {
        "copy_engine": beside(o, "copy_engine_256MB_alone", "attention_with_copy_engine"),
        "nccl": beside(o, "nccl_exchange_256MB_alone", "attention_with_nccl"),
        "nccl_network": 0.9,
    }


def h200(data: dict[str, Any], h100: Cluster) -> Cluster:
    """h200: four kernels at 32 heads; one head by how many of 132 processors it fills."""
    table = data["attention_tflops_heads32_dim128"]
    columns = {name: i for i, name in enumerate(table["columns"])}

    def tables(kernel: str) -> tuple[KernelTable, ...]:
        out = []
        for pass_, short in zip(PASSES, ("fwd", "bwd"), strict=True):
            for causal, kind in enumerate(("full", "causal")):
                found = []
                for row in table["rows"]:
                    q, kv = row[0], row[1]
                    if row[2] != causal:
                        continue
                    rate = row[columns[f"{kernel}_{short}"]] * 1e12
                    work = FLOPS[pass_] * q * kv * 128 / (1 + causal)
                    side = q if pass_ == "forward" else kv
                    busy = min(1.0, side / 128 / 132)
                    found.append((q, kv, 32, 32 * work / rate))
                    found.append((q, kv, 1, max(work / rate / busy, START_S[kernel])))
                out.append(KernelTable(pass_, kind, tuple(found)))
        return tuple(out)

    links = data["links_GBps_per_direction"]
    at = links["columns"].index("copy_engine_get_both_ways")
    inside = Link(
        "copy_engine",
        10e-6,
        tuple((round(r[0] * 2**20), r[0] * 2**20 / r[at] / 1e9) for r in links["rows"]),
    )
    base = h100.known_costs
    return Cluster(
        "h200",
        1,
        8,
        align=128,
        costs=Costs(
            head_dim=128,
            dtype="bfloat16",
            dtype_factors=base.dtype_factors,
            kernels=(
                Kernel("cudnn", False, None, tables("cudnn")),
                Kernel("fa4", True, None, tables("fa4")),
                Kernel("flex", True, 1.0, tables("flex")),
                Kernel("fa2", False, None, tables("fa2")),
            ),
            inside=inside,
            between=base.between,
            nics_per_node=8,
            memory_bytes_per_s=3.8e12,
            local_start_s=5e-6,
            launch_s=30e-6,
            compute_rate=base.compute_rate,
            host_serial=False,
            cores_per_node=0,
            measured=True,
            notes=(
                f"Measured: {data['gpu']}: kernels at 32 heads, links inside the node by copy "
                "engine, kernels beside transfers.",
                "Derived: one head runs at the rate of 32 times the share of 132 processors that "
                "its tiles of 128 rows fill, but no launch is faster than "
                + ", ".join(f"{k} {s * 1e6:g} us" for k, s in START_S.items())
                + "; links between nodes are the h100's.",
                "Assumed: PARTIAL blocks run in FlexAttention; merges at 80 % of the data sheet's "
                "memory bandwidth; float32 and float64 by peak rates; NCCL between nodes leaves "
                "kernels 0.9 of their speed.",
            ),
        ),
    )


START_S = {"cudnn": 12e-6, "fa4": 15e-6, "flex": 20e-6, "fa2": 12e-6}
"""A launch in a replayed graph."""


def beside(overlap: dict[str, float], alone: str, both: str) -> float:
    """The rate r of compute beside a transfer: transfer + compute - r transfer = both."""
    compute, transfer = overlap["attention_alone_8192_heads32"], overlap[alone]
    return round(min(1.0, max(0.01, (transfer + compute - overlap[both]) / transfer)), 3)


def cpu() -> Cluster:
    """A guess, until `ultraattn profile` measures the machine: one core a rank, gloo."""
    pairs_per_s = {"forward": 40e9 / 4 / 64, "backward": 40e9 / 10 / 64}
    tables = tuple(
        KernelTable(
            pass_,
            kind,
            tuple(
                (q, kv, h, 60e-6 + share * q * kv * h / pairs_per_s[pass_])
                for side in (16, 64, 256, 1024, 4096)
                for q, kv in ((side, side), (side, 4 * side), (4 * side, side))
                for h in (1, 8)
                if kind != "causal" or q == kv
            ),
        )
        for pass_ in PASSES
        for kind, share in (("full", 1.0), ("causal", 0.7), ("partial", 1.5))
    )
    link = Link("gloo", 40e-6, tuple((2**p, 150e-6 + 2**p / 1.5e9) for p in range(8, 29, 4)))
    return Cluster(
        "cpu",
        1,
        1,
        align=1,
        costs=Costs(
            head_dim=64,
            dtype="float32",
            dtype_factors=(("bfloat16", 1.5), ("float16", 2.0), ("float64", 2.0)),
            kernels=(Kernel("torch_cpu", False, None, tables),),
            inside=link,
            between=link,
            nics_per_node=1,
            memory_bytes_per_s=5e9,
            local_start_s=30e-6,
            launch_s=40e-6,
            compute_rate=(("gloo", 0.9),),
            host_serial=True,
            cores_per_node=0,
            measured=False,
            notes=("A guess, not measured: `ultraattn profile` measures this machine.",),
        ),
    )


def main(source: Path, target: Path) -> None:
    """Writes every preset."""
    data = {
        name: json.loads((source / f"measured_{name}.json").read_text(encoding="utf-8"))
        for name in ("a800", "h800", "h100", "h200")
    }
    rates = rates_beside(data["h200"])
    made = [published(data[name], rates) for name in ("a800", "h800", "h100")]
    for cluster in [*made, h200(data["h200"], made[-1]), cpu()]:
        cluster.save(target / f"{cluster.name}.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
