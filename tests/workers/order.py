"""Runs a plan as `attend` does, and records the order in which the rank runs its tasks."""

from __future__ import annotations

from typing import Any

from workers.attention import attend


def recorded(rank: int, plan: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """What `attend` gives, and (pass, task) of all that the rank ran, in order."""
    from ultraattn.runtime.session import as_group, session_of

    session = session_of(as_group(None))
    session.trace = []
    try:
        return {**attend(rank, plan, tensors), "trace": list(session.trace)}
    finally:
        session.trace = None
