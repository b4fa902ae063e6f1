"""Gives the rules of a check what they look at, and the words of their errors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ultraattn.chunks import Ints
from ultraattn.errors import PlanError
from ultraattn.plans.kept import kept_values
from ultraattn.plans.layout import Layout
from ultraattn.plans.passes import Pass
from ultraattn.plans.problem import Problem
from ultraattn.plans.program import (
    Block,
    Collective,
    CollectiveOp,
    Program,
    Task,
    Value,
)
from ultraattn.plans.tensors import Tensor


@dataclass(frozen=True)
class Facts:
    """One pass of a plan, as the rules see it."""

    pass_: Pass
    problem: Problem
    q_layout: Layout
    kv_layout: Layout
    nodes: Sequence[int]
    program: Program
    forward: Program | None = None
    """For backward: the plan's forward program, of which it may keep inputs."""

    @property
    def blocks(self) -> Sequence[Block]:
        """Every block."""
        return self.program.block_views

    @property
    def values(self) -> Sequence[Value]:
        """Every value."""
        return self.program.value_views

    @property
    def tasks(self) -> Sequence[Task]:
        """Every task."""
        return self.program.task_views

    def layout(self, tensor: Tensor) -> Layout:
        """The layout of a tensor's rows."""
        return self.kv_layout if tensor.by_key else self.q_layout

    @cached_property
    def spans(self) -> tuple[Sequence[tuple[int, int]], Sequence[tuple[int, int]]]:
        """The query heads (False) and the key/value heads (True) that each block touches."""
        queries = [(block.head_start, block.head_stop) for block in self.blocks]
        keys = {span: self.problem.kv_range(*span) for span in set(queries)}
        return queries, [keys[span] for span in queries]

    @cached_property
    def chunks(self) -> tuple[Sequence[int], Sequence[int]]:
        """The query chunk (False) and the key chunk (True) of each block."""
        return [b.q_chunk for b in self.blocks], [b.kv_chunk for b in self.blocks]

    def heads(self, block: int, tensor: Tensor) -> tuple[int, int]:
        """The heads of a tensor that a block touches."""
        return self.spans[tensor.by_key][block]

    def chunk_of(self, block: int, tensor: Tensor) -> int:
        """The chunk of a tensor that a block touches."""
        return self.chunks[tensor.by_key][block]

    @cached_property
    def line_blocks(self) -> dict[tuple[bool, int], dict[tuple[int, int], list[int]]]:
        """Blocks of each query chunk (False, chunk) and key chunk (True, chunk), by head range."""
        lines: dict[tuple[bool, int], dict[tuple[int, int], list[int]]] = defaultdict(dict)
        for by_key in (False, True):
            rows = zip(self.chunks[by_key], self.spans[by_key], strict=True)
            for index, (chunk, span) in enumerate(rows):
                lines[by_key, chunk].setdefault(span, []).append(index)
        return lines

    @cached_property
    def kept(self) -> Ints:
        """`kept_values` of the pass: int64, (values,)."""
        if self.forward is None:
            return np.full(len(self.program.values.rank), -1, dtype=np.int64)
        return kept_values(self.forward, self.program, self.q_layout, self.kv_layout)

    def fail(self, rule: str, text: str) -> PlanError:
        """The error of a rule."""
        return PlanError(f"{self.pass_} pass, {rule}: {text}")

    def name(self, task: int) -> str:
        """A task, for messages."""
        view = self.tasks[task]
        return f"task {task} ({view.kind} on rank {view.rank})"


def is_scatter(task: Task) -> bool:
    """Whether a task is a reduce-scatter: a collective that merges."""
    return isinstance(task, Collective) and task.op is CollectiveOp.REDUCE_SCATTER
