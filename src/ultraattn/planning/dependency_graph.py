"""Turns blocks and their ranks into the finest graph: every block a launch of its own.

What `graph.build_program` joins by arrival stays apart here, for fusion to decide. Transfers are a
chunk each in both.
"""

from __future__ import annotations

from collections.abc import Sequence

from ultraattn.planning.graph import WORK, HeadRange, _Graph
from ultraattn.plans.builder import Key, ProgramBuilder
from ultraattn.plans.layout import Layout
from ultraattn.plans.passes import Pass
from ultraattn.plans.problem import Problem
from ultraattn.plans.program import Block, Program
from ultraattn.plans.tensors import Tensor


def build_finest(
    pass_: Pass,
    problem: Problem,
    q_layout: Layout,
    kv_layout: Layout,
    nodes: Sequence[int],
    blocks: Sequence[Block],
    ranks: Sequence[int],
) -> Program:
    """As `build_program`, with one launch a block."""
    graph = _Finest(pass_, problem, q_layout, kv_layout, ProgramBuilder(problem, nodes), ranks)
    graph.add_blocks(blocks)
    graph.send_inputs()
    graph.compute()
    graph.merge_results()
    return graph.builder.finish(frozenset(graph.outputs))


class _Finest(_Graph):
    def _tiles(self, rank: int, blocks: list[int]) -> list[tuple[int, list[int]]]:
        return sorted((self._ready(rank, block), [block]) for block in blocks)

    def _send_partials(self, rank: int, tiles: list[tuple[int, list[int]]]) -> None:
        """Merges O with its LSE, of all launches of a row, before they are sent."""
        if self.pass_ is Pass.FORWARD:
            ready: dict[int, int] = {}
            for arrival, tile in tiles:
                for block in tile:
                    chunk = self.builder.blocks[block].q_chunk
                    ready[chunk] = max(ready.get(chunk, arrival), arrival)
            for at, tensor, chunk, heads in list(self.partials):
                parts = self.partials[at, tensor, chunk, heads]
                away = at == rank and self.q_layout.owners[chunk] != rank
                if away and tensor is Tensor.O and len(parts) > 1:
                    key = (WORK, ready[chunk], rank, len(self.ranks) + chunk)
                    self._merge_row(rank, chunk, heads, key)
        super()._send_partials(rank, tiles)

    def _merge_row(self, rank: int, chunk: int, heads: HeadRange, key: Key) -> None:
        reads, writes = [], []
        for tensor in (Tensor.O, Tensor.LSE):
            parts = self.partials[rank, tensor, chunk, heads]
            views = [self.builder.values[part] for part in parts]
            cover = tuple(sorted(block for view in views for block in view.cover))
            merged = self.builder.value(views[0]._replace(wide=False, cover=cover))
            self.partials[rank, tensor, chunk, heads] = [merged]
            reads += parts
            writes.append(merged)
        self.builder.merge(rank, reads, writes, key)
