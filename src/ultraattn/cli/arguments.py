"""Reads command-line options into a mask, a cluster and the arguments of `ultraattn.plan`."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ultraattn import masks, planning
from ultraattn.cli.options import DEFAULTS, PlanOptions
from ultraattn.cluster import Cluster
from ultraattn.errors import InputError
from ultraattn.masks import Mask
from ultraattn.masks.document import Document
from ultraattn.plans import Plan

MASK_OPTIONS = (
    "window", "lengths", "causal", "grid", "period", "width", "globals", "locals", "sink", "local",
    "q_ranges", "k_ranges", "kinds", "table",
)  # fmt: skip
PLANNING_OPTIONS = (
    "head_dim", "value_dim", "dtype", "scale", "strategy", "layout", "kv_layout", "chunks",
    "head_groups", "load_cap", "effort", "units", "keep_received",
)  # fmt: skip


def make_plan(
    options: PlanOptions, seqlen: int | None = None, ranks: int | None = None
) -> tuple[Plan, float]:
    """The plan that the options describe, and the seconds that planning took.

    Args:
        options: as typed.
        seqlen: the queries where neither `--seqlen` nor document lengths say.
        ranks: the ranks where no option says.

    Raises:
        InputError: an option cannot be served; says what was given, expected, and to do.
    """
    begin = time.perf_counter()
    made = planning.plan(mask_of(options), **arguments_of(options, seqlen, ranks))
    return made, time.perf_counter() - begin


def arguments_of(
    options: PlanOptions, seqlen: int | None = None, ranks: int | None = None
) -> dict[str, Any]:
    """The arguments of `ultraattn.plan` that the options describe, besides the mask."""
    arguments: dict[str, Any] = {
        name: value
        for name in PLANNING_OPTIONS
        if (value := getattr(options, name, None)) is not None
    }
    heads = DEFAULTS["heads"] if options.heads is None else options.heads
    kv_heads = options.kv_heads
    if kv_heads is None and options.heads is None:
        kv_heads = DEFAULTS["kv_heads"]
    _positive("heads", heads)
    _positive("kv-heads", kv_heads)
    arguments.setdefault("head_dim", DEFAULTS["head_dim"])
    arguments.setdefault("dtype", DEFAULTS["dtype"])
    mask = mask_of(options)
    return {
        **arguments,
        "seqlen": _seqlen(options, mask, DEFAULTS["seqlen"] if seqlen is None else seqlen),
        "kv_seqlen": (
            None if options.kv_seqlen is None else tokens(options.kv_seqlen, "--kv-seqlen")
        ),
        "heads": heads,
        "kv_heads": kv_heads,
        "cluster": cluster_of(options, DEFAULTS["ranks"] if ranks is None else ranks),
    }


def plan_of(options: PlanOptions, file: Path | None) -> Plan:
    """The plan in `file`, or the one that the options describe.

    Raises:
        InputError: both are given, or the file cannot be read.
        PlanError: the file holds no sound plan.
    """
    if file is None:
        return make_plan(options)[0]
    if options.given:
        raise InputError(
            f"plan file {file} together with {', '.join(options.given)}: a file holds a whole "
            "plan; leave these out, or leave the file out to plan anew"
        )
    try:
        return Plan.load(file)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"plan file {file}: {reason(error)}; give a file that `ultraattn plan --out` wrote"
        ) from None


def reason(error: Exception) -> str:
    """Why a file could not be read or written, in a few words."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _seqlen(options: PlanOptions, mask: Mask, default: int) -> int:
    """Queries: `--seqlen`, or what document lengths add up to, or `default`."""
    if options.seqlen is not None:
        return tokens(options.seqlen, "--seqlen")
    return sum(mask.lengths) if isinstance(mask, Document) else default


def tokens(text: str, option: str) -> int:
    """Reads a number of tokens.

    >>> tokens("64k", "--seqlen"), tokens("1m", "--seqlen"), tokens("65536", "--seqlen")
    (65536, 1048576, 65536)
    """
    factors = {"k": 2**10, "m": 2**20}
    digits = text.strip().lower().replace("_", "")
    factor = factors.get(digits[-1:], 1)
    digits = digits[:-1] if factor > 1 else digits
    if not (digits.isascii() and digits.isdigit()):
        raise InputError(f"{option} {text!r}: expected tokens, as in 65536, 64k or 1m")
    return int(digits) * factor


def mask_of(options: PlanOptions) -> Mask:
    """The mask that `--mask` and its parameters name."""
    given = {name: getattr(options, name) for name in MASK_OPTIONS}
    readers: dict[str, Callable[[str], Any]] = {
        "lengths": lambda text: [tokens(part, "--lengths") for part in text.split(",")],
        "q_ranges": lambda text: _ranges(text, "--q-ranges"),
        "k_ranges": lambda text: _ranges(text, "--k-ranges"),
        "kinds": lambda text: text.split(",") if "," in text else text,
        "table": _table,
    }
    parameters = {
        name: readers[name](value) if name in readers else value
        for name, value in given.items()
        if value is not None
    }
    return masks.by_name(options.mask or DEFAULTS["mask"], **parameters)


def cluster_of(options: PlanOptions, default_ranks: int) -> Cluster:
    """The cluster that `--cluster`, `--ranks`, `--nodes` and `--gpus-per-node` name.

    Where none of them says how many ranks, the cluster's own number, or `default_ranks` of one.
    """
    for name in ("ranks", "nodes", "gpus_per_node"):
        _positive(name.replace("_", "-"), getattr(options, name))
    cluster = Cluster.load(options.cluster or "cpu")
    nodes, each, ranks = options.nodes, options.gpus_per_node, options.ranks
    if nodes is not None or each is not None:
        sized = cluster.resize(nodes=nodes, gpus_per_node=each)
        if ranks is not None and ranks != sized.ranks:
            raise InputError(
                f"--ranks {ranks} with {sized.nodes} nodes of {sized.gpus_per_node} ranks: "
                f"expected {sized.ranks}; give --ranks, or --nodes and --gpus-per-node"
            )
        return sized
    if ranks is None:
        return cluster if cluster.ranks > 1 else cluster.resize(gpus_per_node=default_ranks)
    return cluster.with_ranks(ranks)


def _positive(option: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise InputError(f"--{option} {value}: expected at least 1")


def _ranges(text: str, option: str) -> list[tuple[int, int]]:
    pairs = []
    for part in text.split(","):
        ends = part.split(":")
        if len(ends) != 2:
            raise InputError(f"{option} {text!r}: expected START:STOP,..., as in 0:64,64:128")
        pairs.append((tokens(ends[0], option), tokens(ends[1], option)))
    return pairs


def _table(text: str) -> list[list[int]]:
    rows = text.split("/")
    if not all(row and set(row) <= set("012") for row in rows):
        raise InputError(
            f"--table {text!r}: expected rows of cells, 0 empty, 1 full, 2 causal, with a slash "
            "between rows, as in 20/12"
        )
    return [[int(cell) for cell in row] for row in rows]
