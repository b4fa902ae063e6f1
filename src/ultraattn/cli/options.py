"""Turns command-line options into a mask, a cluster and the arguments of `ultraattn.plan`.

One frozen dataclass holds the options of every command, so that all commands agree on them; each
field is an option, its `typer.Option` says how it is read. Nothing given is None: a default is
filled in where it is used.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import time
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from ultraattn import masks, planning
from ultraattn.cluster import Cluster
from ultraattn.errors import InputError
from ultraattn.masks import Mask
from ultraattn.masks.document import Document
from ultraattn.plans import Plan
from ultraattn.strategies import NAMES as RIVALS

DEFAULTS: dict[str, Any] = {
    "mask": "causal", "seqlen": 2048, "heads": 8, "kv_heads": 2, "head_dim": 64,
    "dtype": "float32", "ranks": 4,
}  # fmt: skip
"""The problem of a bare `ultraattn run`: small enough for any laptop."""

MASK, SHAPE, PLACE, HOW = "The mask", "The shape", "The machine", "How to plan"


@dataclass(frozen=True)
class PlanOptions:
    """What to plan. Mask parameters go to the mask's factory as they are."""

    mask: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help=f"What a query sees: {', '.join(masks.NAMES)}. \\[default: {DEFAULTS['mask']}]",
            rich_help_panel=MASK,
        ),
    ] = None
    window: Annotated[
        int | None,
        Option(help="sliding_window: keys each query sees, itself one.", rich_help_panel=MASK),
    ] = None
    lengths: Annotated[
        str | None,
        Option(help="document: lengths, as in 137,45,89.", rich_help_panel=MASK),
    ] = None
    causal: Annotated[
        bool | None,
        Option(
            "--causal/--no-causal",
            help="document: each token sees its own document up to itself, or all of it.",
            rich_help_panel=MASK,
        ),
    ] = None
    grid: Annotated[
        int | None,
        Option(help="strided, global_local, star, streaming: cells a side.", rich_help_panel=MASK),
    ] = None
    period: Annotated[int | None, Option(help="strided.", rich_help_panel=MASK)] = None
    width: Annotated[int | None, Option(help="strided.", rich_help_panel=MASK)] = None
    globals: Annotated[
        int | None, Option(help="global_local: cells all see.", rich_help_panel=MASK)
    ] = None
    locals: Annotated[
        int | None,
        Option(help="global_local: cells either side, the own one counted.", rich_help_panel=MASK),
    ] = None
    sink: Annotated[
        int | None, Option(help="streaming: first cells that all see.", rich_help_panel=MASK)
    ] = None
    local: Annotated[
        int | None, Option(help="streaming: last cells that are seen.", rich_help_panel=MASK)
    ] = None
    q_ranges: Annotated[
        str | None, Option(help="from_ranges: as in 0:64,64:128.", rich_help_panel=MASK)
    ] = None
    k_ranges: Annotated[
        str | None, Option(help="from_ranges: one a query range.", rich_help_panel=MASK)
    ] = None
    kinds: Annotated[
        str | None,
        Option(
            help="from_ranges: full, causal or inverse_causal, one for all or one a range.",
            rich_help_panel=MASK,
        ),
    ] = None
    table: Annotated[
        str | None,
        Option(
            help="from_blocks: rows of cells, 0 empty, 1 full, 2 causal, as in 20/12.",
            rich_help_panel=MASK,
        ),
    ] = None
    seqlen: Annotated[
        str | None,
        Option(
            metavar="TOKENS",
            help=f"Queries, as in 65536, 64k or 1m. \\[default: {DEFAULTS['seqlen']}]",
            rich_help_panel=SHAPE,
        ),
    ] = None
    kv_seqlen: Annotated[
        str | None,
        Option(
            metavar="TOKENS", help="Keys. \\[default: as many as queries]", rich_help_panel=SHAPE
        ),
    ] = None
    heads: Annotated[
        int | None,
        Option(help=f"Query heads. \\[default: {DEFAULTS['heads']}]", rich_help_panel=SHAPE),
    ] = None
    kv_heads: Annotated[
        int | None,
        Option(
            help=f"Key/value heads, a divisor of --heads. \\[default: {DEFAULTS['kv_heads']}; "
            "as many as --heads where that is given]",
            rich_help_panel=SHAPE,
        ),
    ] = None
    head_dim: Annotated[
        int | None,
        Option(
            help=f"Elements of a query or key. \\[default: {DEFAULTS['head_dim']}]",
            rich_help_panel=SHAPE,
        ),
    ] = None
    value_dim: Annotated[
        int | None,
        Option(help="Elements of a value. \\[default: --head-dim]", rich_help_panel=SHAPE),
    ] = None
    dtype: Annotated[
        str | None,
        Option(
            metavar="DTYPE",
            help=f"float64, float32, bfloat16 or float16. \\[default: {DEFAULTS['dtype']}]",
            rich_help_panel=SHAPE,
        ),
    ] = None
    scale: Annotated[
        float | None,
        Option(help="Factor of the scores. \\[default: head_dim ** -0.5]", rich_help_panel=SHAPE),
    ] = None
    ranks: Annotated[
        int | None,
        Option(
            help=f"Ranks in all. \\[default: {DEFAULTS['ranks']}, or the cluster's]",
            rich_help_panel=PLACE,
        ),
    ] = None
    nodes: Annotated[
        int | None, Option(help="Nodes, with --gpus-per-node.", rich_help_panel=PLACE)
    ] = None
    gpus_per_node: Annotated[
        int | None, Option(help="Ranks of each node, with --nodes.", rich_help_panel=PLACE)
    ] = None
    cluster: Annotated[
        str | None,
        Option(
            metavar="NAME|FILE",
            help="The kind of machine. \\[default: cpu]",
            rich_help_panel=PLACE,
        ),
    ] = None
    strategy: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="How blocks get their ranks: tile (this system's search), rows, auto (the fastest "
            f"of all in simulated time), or a rival: {', '.join(RIVALS)}. \\[default: tile]",
            rich_help_panel=HOW,
        ),
    ] = None
    layout: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="Which rank owns which tokens: contiguous, zigzag, striped, remapped (the mask's "
            "own order) or auto. \\[default: auto]",
            rich_help_panel=HOW,
        ),
    ] = None
    kv_layout: Annotated[
        str | None,
        Option(
            metavar="NAME", help="The same for keys. \\[default: --layout]", rich_help_panel=HOW
        ),
    ] = None
    chunks: Annotated[
        int | None,
        Option(help="Chunks of the sequence. \\[default: the layout's least]", rich_help_panel=HOW),
    ] = None
    head_groups: Annotated[
        int | None,
        Option(help="Ranges that the heads are cut into. \\[default: chosen]", rich_help_panel=HOW),
    ] = None
    load_cap: Annotated[
        float | None,
        Option(
            help="Largest load over the mean; with --units paper, in full blocks. "
            "\\[default: 1.05, or ceil(W/N)]",
            rich_help_panel=HOW,
        ),
    ] = None
    effort: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="How hard to search: instant, fast, normal or best. \\[default: normal]",
            rich_help_panel=HOW,
        ),
    ] = None
    units: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="What sizes, bounds and proofs are stated in: bytes or paper. \\[default: bytes]",
            rich_help_panel=HOW,
        ),
    ] = None

    @property
    def given(self) -> tuple[str, ...]:
        """The options that were given, as they are typed."""
        names = (f.name for f in dataclasses.fields(self) if getattr(self, f.name) is not None)
        return tuple("--" + name.replace("_", "-") for name in names)


MASK_OPTIONS = (
    "window", "lengths", "causal", "grid", "period", "width", "globals", "locals", "sink", "local",
    "q_ranges", "k_ranges", "kinds", "table",
)  # fmt: skip
PLANNING_OPTIONS = (
    "head_dim", "value_dim", "dtype", "scale", "strategy", "layout", "kv_layout", "chunks",
    "head_groups", "load_cap", "effort", "units",
)  # fmt: skip


def takes_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command, which takes `options: PlanOptions`, an option for every field of it."""
    hints = typing.get_type_hints(PlanOptions, include_extras=True)
    fields = [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hints[field.name]
        )
        for field in dataclasses.fields(PlanOptions)
    ]
    own_hints = typing.get_type_hints(command, include_extras=True)
    own = [
        parameter.replace(annotation=own_hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(command).parameters.items()
        if name != "options"
    ]

    @functools.wraps(command)
    def wrapper(**values: Any) -> None:
        options = PlanOptions(**{field.name: values.pop(field.name) for field in fields})
        command(options=options, **values)

    # What typer reads instead of the wrapped function's own parameters.
    parameters = [*own, *fields]
    del wrapper.__wrapped__
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapper


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
