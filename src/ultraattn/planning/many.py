"""Finds one layout for several masks of one model, and shows what each mask pays for sharing it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ultraattn.errors import InputError
from ultraattn.masks import Mask
from ultraattn.planning.plan import plan
from ultraattn.plans.check import Pass
from ultraattn.plans.layout import Layout
from ultraattn.plans.plan import Plan


@dataclass(frozen=True, eq=False)
class Share:
    """One mask over the common layout, beside its own best."""

    plan: Plan
    load_over_mean: float
    """Of the busier pass."""
    predicted_s: float
    """Both passes over the common layout, in simulated seconds."""
    own_s: float
    """Both passes over the mask's own best layout."""
    own_layout: str

    @property
    def over_own(self) -> float:
        """What the common layout costs this mask: 1 where nothing."""
        return self.predicted_s / self.own_s if self.own_s else 1.0


@dataclass(frozen=True, eq=False)
class Many:
    """Plans of several masks over one layout."""

    layout: Layout
    shares: tuple[Share, ...]

    @property
    def plans(self) -> tuple[Plan, ...]:
        """One a mask, in the order in which they were given."""
        return tuple(share.plan for share in self.shares)

    def summary(self) -> str:
        """A line a mask."""
        lines = [f"{len(self.shares)} masks over layout {self.layout.name}"]
        for share in self.shares:
            lines.append(
                f"{share.plan.problem.mask_label}: {share.predicted_s * 1e3:.3f} ms simulated, "
                f"{share.over_own:.3f} x its own best ({share.own_layout}), load "
                f"{share.load_over_mean:.3f} x mean"
            )
        return "\n".join(lines)


def plan_many(
    masks: Sequence[Mask],
    *,
    counts: Sequence[int] | None = None,
    strategy: str = "auto",
    **arguments: Any,
) -> Many:
    """Plans several masks over one layout, so that tensors keep their places from layer to layer.

    The layouts tried are the best of each mask; the one of least simulated time wins, all masks
    together.

    Args:
        masks: one a kind of layer.
        counts: layers of each kind; one each unless given.
        strategy: as in `ultraattn.plan`.
        arguments: as in `ultraattn.plan`, for all masks alike; no layout.

    Raises:
        InputError: as in `ultraattn.plan`; no masks, or a layout; a cluster without costs.
    """
    masks = list(masks)
    counts = [1] * len(masks) if counts is None else list(counts)
    if not masks or len(counts) != len(masks) or min(counts) < 1:
        raise InputError(
            f"plan_many of {len(masks)} masks with counts {counts}: expected at least one mask, "
            "and a count of at least 1 for each"
        )
    if {"layout", "kv_layout", "chunks"} & arguments.keys():
        raise InputError(
            "plan_many with a layout or chunks: it looks for the layout itself; use plan for each "
            "mask where the layout is known"
        )
    own = [plan(mask, strategy=strategy, **arguments) for mask in masks]
    times = [_time_s(made) for made in own]
    best: list[Plan] | None = None
    best_s = float("inf")
    tried: list[tuple[Layout, Layout]] = []
    for first in own:
        layouts = (first.q_layout, first.kv_layout)
        if layouts in tried:
            continue
        tried.append(layouts)
        plans = [
            made
            if (made.q_layout, made.kv_layout) == layouts
            else _over(mask, layouts, strategy, arguments)
            for mask, made in zip(masks, own, strict=True)
        ]
        total = sum(n * _time_s(made) for n, made in zip(counts, plans, strict=True))
        if best is None or total < best_s:
            best, best_s = plans, total
    assert best is not None
    return Many(
        best[0].q_layout,
        tuple(
            Share(
                made,
                max(made.account(pass_).load_over_mean for pass_ in Pass),
                _time_s(made),
                own_s,
                alone.q_layout.name,
            )
            for made, alone, own_s in zip(best, own, times, strict=True)
        ),
    )


def _over(
    mask: Mask, layouts: tuple[Layout, Layout], strategy: str, arguments: Mapping[str, Any]
) -> Plan:
    q, kv = layouts
    return plan(mask, strategy=strategy, layout=q, kv_layout=kv, **arguments)


def _time_s(made: Plan) -> float:
    """Simulated seconds of both passes.

    Raises:
        InputError: the cluster has no costs.
    """
    times = [made.pass_plan(pass_).predicted_s for pass_ in Pass]
    known = [t for t in times if t is not None]
    if len(known) < len(times):
        raise InputError(
            f"plan_many on cluster {made.place.cluster!r} without costs, or at effort instant: "
            "layouts are compared in simulated time; pass a preset, and effort fast or more"
        )
    return sum(known)
