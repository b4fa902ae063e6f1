"""Declares what is planned as command-line options; `ultraattn.cli.arguments` reads them.

One frozen dataclass holds the options of every command, so that all commands agree on them; each
field is an option, its `typer.Option` says how it is read. Nothing given is None: a default is
filled in where it is used.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from typer import Option

from ultraattn import masks
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
    keep_received: Annotated[
        bool | None,
        Option(
            "--keep-received/--send-again",
            help="Backward reads again what a rank received in forward, where that is faster, for "
            "memory between the passes. \\[default: send again]",
            rich_help_panel=HOW,
        ),
    ] = None

    @property
    def given(self) -> tuple[str, ...]:
        """The options that were given, as they are typed."""
        names = (f.name for f in dataclasses.fields(self) if getattr(self, f.name) is not None)
        return tuple("--" + name.replace("_", "-") for name in names)


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
