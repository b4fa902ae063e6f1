"""Turns blocks and their ranks into the finest graph: every block a launch of its own.

What `graph.build_program` joins by arrival stays apart here, for fusion to decide. Transfers are a
chunk each in both.
"""

from __future__ import annotations

from collections.abc import Sequence

from ultraattn.planning.graph import NOTHING_HELD, Graph, Held
from ultraattn.plans.builder import ProgramBuilder
from ultraattn.plans.layout import Layout
from ultraattn.plans.passes import Pass
from ultraattn.plans.problem import Problem
from ultraattn.plans.program import Block, Program


def build_finest(
    pass_: Pass,
    problem: Problem,
    q_layout: Layout,
    kv_layout: Layout,
    nodes: Sequence[int],
    blocks: Sequence[Block],
    ranks: Sequence[int],
    held: Held = NOTHING_HELD,
) -> Program:
    """As `build_program`, with one launch a block."""
    builder = ProgramBuilder(problem, nodes)
    graph = _Finest(pass_, problem, q_layout, kv_layout, builder, ranks, held)
    graph.add_blocks(blocks)
    graph.send_inputs()
    graph.compute()
    graph.merge_results()
    return graph.builder.finish(frozenset(graph.outputs))


class _Finest(Graph):
    def _tiles(self, rank: int, blocks: list[int]) -> list[tuple[int, list[int]]]:
        return sorted((self._ready(rank, block), [block]) for block in blocks)
