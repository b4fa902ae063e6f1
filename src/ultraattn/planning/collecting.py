"""Holds back the search for cyclic garbage while a plan is made: planning makes hardly any."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collecting() -> Iterator[None]:
    """Within it, no search for cyclic garbage starts by itself.

    A plan for many ranks is hundreds of thousands of small tuples that all live until it is done;
    searching them for cycles again and again takes a fifth of the time. Where the caller had
    switched the search off, it stays off.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
