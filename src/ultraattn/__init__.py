"""Context-parallel attention for any mask: planned, overlapped, exact, forward and backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ultraattn import masks
from ultraattn.cluster import Cluster
from ultraattn.errors import InputError, MissingExtraError, PlanError, RunError, UltraAttnError
from ultraattn.planning import plan, plan_many
from ultraattn.plans import Layout, Plan
from ultraattn.report import report

if TYPE_CHECKING:
    from ultraattn.runtime import Attention, share
    from ultraattn.simulation import simulate

__version__ = "0.1.0"

__all__ = [
    "Attention",
    "Cluster",
    "InputError",
    "Layout",
    "MissingExtraError",
    "Plan",
    "PlanError",
    "RunError",
    "UltraAttnError",
    "masks",
    "plan",
    "plan_many",
    "report",
    "share",
    "simulate",
]


def __getattr__(name: str) -> Any:
    """Names that few programs need are imported when they are first used; some need torch."""
    if name in ("Attention", "share"):
        from ultraattn import runtime

        return getattr(runtime, name)
    if name == "simulate":
        from ultraattn.simulation import simulate

        return simulate
    raise AttributeError(f"module 'ultraattn' has no attribute {name!r}")
