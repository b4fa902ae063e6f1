"""Draws a plan: in the terminal, as an HTML page, as SVG."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ultraattn.plans import Plan

__all__ = ["report"]


def report(plan: Plan, path: str | Path) -> None:
    """Writes a picture of a plan that needs nothing else to be looked at.

    Args:
        plan: what is drawn.
        path: where; ``.html`` gives a page (matrix, loads, traffic, tasks), ``.svg`` the matrix of
            the forward pass alone.

    Raises:
        InputError: another kind of file, or one that cannot be written.
    """
    from ultraattn.errors import InputError

    target = Path(path)
    if target.suffix == ".html":
        from ultraattn.report.html import page

        text = page(plan)
    elif target.suffix == ".svg":
        from ultraattn.plans.check import Pass
        from ultraattn.report.svg import picture

        text = picture(plan, Pass.FORWARD)
    else:
        raise InputError(f"report {target}: expected a file named .html or .svg")
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"report {target}: {error.strerror}; name a file in a folder that exists and can be "
            "written to"
        ) from None
