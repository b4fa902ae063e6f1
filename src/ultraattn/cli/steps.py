"""Shows the steps of a command while they run, with the seconds each took, on standard error."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from rich.console import Console


class Steps:
    """Prints to `console` as steps begin and end; a live spinner where it is a terminal.

    Args:
        console: where; None shows nothing.
    """

    def __init__(self, console: Console | None) -> None:
        self._console = console

    @contextlib.contextmanager
    def step(self, what: str) -> Iterator[None]:
        """While it lasts, `what` is under way."""
        if self._console is None:
            yield
            return
        begin = time.perf_counter()
        with self._console.status(f"{what} ..."):
            yield
        seconds = time.perf_counter() - begin
        self._console.print(f"[green]✓[/green] {what} [dim]{seconds:.2f} s[/dim]", highlight=False)
