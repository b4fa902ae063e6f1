"""Takes from a program what one rank needs of it."""

from __future__ import annotations

from dataclasses import dataclass

from ultraattn.plans.program import Block, Program, Task, Value


@dataclass(frozen=True)
class RankProgram:
    """What one rank needs of a program, in its order of issue."""

    rank: int
    tasks: tuple[Task, ...]
    values: dict[int, Value]
    blocks: dict[int, Block]
    buffer_bytes: dict[int, int]
    """Bytes of each of its workspace buffers, for one batch entry."""


def rank_program(program: Program, rank: int) -> RankProgram:
    """The tasks of one rank, in order of issue, with the values and blocks they name."""
    values = program.value_views
    mine = tuple(
        task for task in program.task_views if any(r == rank for r in program.ranks_of(task))
    )
    named = {v: values[v] for task in mine for v in (*task.reads, *task.writes)}
    blocks = {
        block
        for task in mine
        for block in (*getattr(task, "tile", ()), *(b for v in task.reads for b in values[v].cover))
    }
    sizes = program.buffers.bytes.tolist()
    buffers = {
        v.buffer: sizes[v.buffer] for v in named.values() if v.rank == rank and v.buffer >= 0
    }
    return RankProgram(
        rank, mine, named, {b: program.block_views[b] for b in sorted(blocks)}, buffers
    )
