"""Turns blocks into ranks by rows: the owner of a query chunk computes all of its blocks."""

from __future__ import annotations

from collections.abc import Sequence

from ultraattn.plans.layout import Layout
from ultraattn.plans.program import Block


def rows(blocks: Sequence[Block], q_layout: Layout) -> list[int]:
    """The rank of each block: keys and values come to the queries, no partial result moves."""
    return [q_layout.owners[block.q_chunk] for block in blocks]
