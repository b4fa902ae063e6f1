"""Gives the rules of a check what they look at, and the words of their errors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ultraattn.errors import PlanError
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

    def heads(self, block: int, tensor: Tensor) -> tuple[int, int]:
        """The heads of a tensor that a block touches."""
        b = self.blocks[block]
        if tensor.by_key:
            return self.problem.kv_range(b.head_start, b.head_stop)
        return b.head_start, b.head_stop

    def chunk_of(self, block: int, tensor: Tensor) -> int:
        """The chunk of a tensor that a block touches."""
        b = self.blocks[block]
        return b.kv_chunk if tensor.by_key else b.q_chunk

    @cached_property
    def line_blocks(self) -> dict[tuple[bool, int], list[int]]:
        """Blocks of each query chunk (False, chunk) and key chunk (True, chunk)."""
        lines: dict[tuple[bool, int], list[int]] = defaultdict(list)
        for index, block in enumerate(self.blocks):
            lines[False, block.q_chunk].append(index)
            lines[True, block.kv_chunk].append(index)
        return lines

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
