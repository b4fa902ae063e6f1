"""Checks covers: every block is computed once, and enters every result that it belongs to once."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence

from ultraattn.plans.check.facts import Facts, is_scatter
from ultraattn.plans.check.regions import Region, area, atoms, covered, overlap, region_of
from ultraattn.plans.program import (
    Collective,
    Compute,
    Local,
    LocalOp,
    Merge,
    Task,
    Transfer,
    Value,
)
from ultraattn.plans.tensors import Tensor


def each_block_computed_once(facts: Facts) -> None:
    """Every block is in exactly one tile."""
    by: dict[int, int] = {}
    for task in facts.tasks:
        if isinstance(task, Compute):
            for block in task.tile:
                if block in by:
                    raise facts.fail(
                        "each block once",
                        f"block {block} is computed by {facts.name(by[block])} and "
                        f"{facts.name(task.index)}",
                    )
                by[block] = task.index
    for index, view in enumerate(facts.blocks):
        if index not in by:
            raise facts.fail(
                "each block once",
                f"block {index} (query chunk {view.q_chunk}, key chunk {view.kv_chunk}) is "
                "never computed",
            )


def inputs_complete(facts: Facts) -> None:
    """A launch, or a delta, reads all that it needs."""
    for task in facts.tasks:
        if isinstance(task, Compute):
            _tile_inputs(facts, task)
        elif isinstance(task, Local) and task.op is LocalOp.DELTA:
            _delta_inputs(facts, task)


def _tile_inputs(facts: Facts, task: Compute) -> None:
    have = _read_regions(facts, task)
    for by_key in (False, True):
        chunks, spans = facts.chunks[by_key], facts.spans[by_key]
        needed = {(chunks[block], spans[block]): block for block in reversed(task.tile)}
        for tensor in facts.pass_.needs:
            if tensor.by_key != by_key:
                continue
            for (chunk, heads), block in needed.items():
                region = (0, len(facts.layout(tensor).chunks[chunk]), *heads)
                if not covered(region, have[tensor, chunk]):
                    raise facts.fail(
                        "inputs of a tile",
                        f"{facts.name(task.index)} computes block {block} without all of {tensor} "
                        f"of chunk {chunk}, heads {heads[0]}:{heads[1]}",
                    )


def _delta_inputs(facts: Facts, task: Local) -> None:
    """delta = rowsum(dO * O) over whole rows of a chunk."""
    have = _read_regions(facts, task)
    for number in task.writes:
        value = facts.values[number]
        rows = len(facts.q_layout.chunks[value.chunk])
        region = (0, rows, value.head_start, value.head_stop)
        for tensor in (Tensor.DO, Tensor.O):
            if region_of(value) != region or not covered(region, have[tensor, value.chunk]):
                raise facts.fail(
                    "inputs of a delta",
                    f"{facts.name(task.index)} makes {value.place()} without all rows of it and "
                    f"of {tensor}",
                )


def _read_regions(facts: Facts, task: Task) -> dict[tuple[Tensor, int], list[Region]]:
    have: dict[tuple[Tensor, int], list[Region]] = defaultdict(list)
    for number in task.reads:
        value = facts.values[number]
        have[value.tensor, value.chunk].append(region_of(value))
    return have


def _relevant(facts: Facts, cover: Iterable[int], tensor: Tensor, atom: Region) -> set[int]:
    """The blocks of a cover that reach the heads of an atom."""
    spans, first, last = facts.spans[tensor.by_key], atom[2], atom[3]
    return {block for block in cover if spans[block][0] < last and first < spans[block][1]}


def tile_outputs_complete(facts: Facts) -> None:
    """A launch gives the partial results of its blocks, each once.

    A result may span heads that no block of the launch has: there it is that of no block (zeros,
    an LSE of -inf).
    """
    for task in facts.tasks:
        if not isinstance(task, Compute):
            continue
        if not task.tile:
            raise facts.fail("outputs of a tile", f"{facts.name(task.index)} computes no block")
        outputs: dict[tuple[Tensor, int], list[Value]] = defaultdict(list)
        for number in task.writes:
            value = facts.values[number]
            if value.tensor not in facts.pass_.results:
                raise facts.fail("outputs of a tile", f"{facts.name(task.index)} writes {value}")
            outputs[value.tensor, value.chunk].append(value)
        lines: dict[tuple[Tensor, int], set[int]] = defaultdict(set)
        for tensor in facts.pass_.results:
            chunks = facts.chunks[tensor.by_key]
            for block in task.tile:
                lines[tensor, chunks[block]].add(block)
        for key in sorted(outputs.keys() | lines.keys()):
            tensor, chunk = key
            rows = len(facts.layout(tensor).chunks[chunk])
            for head_atom in _head_atoms(facts, tensor, lines[key], outputs[key]):
                atom = (0, rows, *head_atom)
                expected = _relevant(facts, lines[key], tensor, atom)
                holders = [v for v in outputs[key] if area(overlap(region_of(v), atom))]
                if rows == 0 or not (expected or holders):
                    continue
                if (
                    not lines[key]
                    or len(holders) != 1
                    or _relevant(facts, holders[0].cover, tensor, atom) != expected
                    or (holders[0].row_start, holders[0].row_stop) != (0, rows)
                ):
                    raise facts.fail(
                        "outputs of a tile",
                        f"{facts.name(task.index)} must give {tensor} of chunk {chunk} heads "
                        f"{head_atom[0]}:{head_atom[1]} for blocks {sorted(expected)} exactly "
                        f"once; it gives {[sorted(h.cover) for h in holders]}",
                    )


def _head_atoms(
    facts: Facts, tensor: Tensor, blocks: Iterable[int], values: Iterable[Value]
) -> list[tuple[int, int]]:
    spans = facts.spans[tensor.by_key]
    cuts = {cut for block in blocks for cut in spans[block]}
    cuts |= {cut for value in values for cut in (value.head_start, value.head_stop)}
    ordered = sorted(cuts)
    return list(itertools.pairwise(ordered))


def merges_disjoint(facts: Facts) -> None:
    """A merge takes every partial result of its cover exactly once."""
    for task in facts.tasks:
        joins = isinstance(task, Local) and task.op in (LocalOp.GATHER, LocalOp.PACK, LocalOp.CAST)
        if isinstance(task, Merge) or is_scatter(task) or joins:
            reads = [facts.values[number] for number in task.reads]
            for number in task.writes:
                _check_merge(facts, task, facts.values[number], reads, joins)


def _check_merge(
    facts: Facts, task: Task, written: Value, reads: Sequence[Value], joins: bool
) -> None:
    same = [r for r in reads if r.tensor == written.tensor and r.chunk == written.chunk]
    parts = [r for r in same if area(overlap(region_of(r), region_of(written)))]
    if not parts and area(region_of(written)):
        raise facts.fail("merges", f"{facts.name(task.index)} makes {written.place()} of nothing")
    for atom in atoms(region_of(written), [region_of(part) for part in parts]):
        here = [part for part in parts if area(overlap(region_of(part), atom))]
        target = _relevant(facts, written.cover, written.tensor, atom)
        covers = [_relevant(facts, part.cover, written.tensor, atom) for part in here]
        union: set[int] = set().union(*covers)
        twice = sum(map(len, covers)) != len(union) or (joins and len(here) > 1)
        if twice or union != target or not here:
            raise facts.fail(
                "merges",
                f"{facts.name(task.index)} makes {written.place()} for blocks {sorted(target)} of "
                f"parts for {[sorted(cover) for cover in covers]}: a partial result must enter "
                "exactly once",
            )


def partials_used_once(facts: Facts) -> None:
    """A partial result goes one way, whole."""
    used: dict[int, int] = defaultdict(int)
    for task in facts.tasks:
        copies = isinstance(task, (Transfer, Collective)) and not is_scatter(task)
        for number in task.reads:
            read = facts.values[number]
            if read.tensor not in facts.pass_.results:
                continue
            if copies:
                written = [facts.values[v] for v in task.writes]
                used[number] += sum(area(region_of(v)) for v in written if read.holds(v))
            else:
                used[number] += area(region_of(read))
    producer = facts.program.producers
    for index, value in enumerate(facts.values):
        if value.tensor not in facts.pass_.results or producer[index] < 0:
            continue
        size = area(region_of(value))
        expected = 0 if value.buffer < 0 else size
        if size and used[index] != expected:
            times = "more than once" if used[index] > expected else "not wholly"
            raise facts.fail(
                "partials once",
                f"{value.place()} for blocks {list(value.cover)} is used {times}",
            )


def results_complete(facts: Facts) -> None:
    """Every result reaches its owner whole, once, over all blocks of its row or column."""
    producer = facts.program.producers
    found: dict[tuple[Tensor, int], list[Value]] = defaultdict(list)
    for index, value in enumerate(facts.values):
        if producer[index] >= 0 and value.buffer < 0:
            owner = facts.layout(value.tensor).owners[value.chunk]
            if value.tensor not in facts.pass_.results or value.rank != owner or value.wide:
                raise facts.fail("results", f"{value.place()} is no result of its rank")
            found[value.tensor, value.chunk].append(value)
    for tensor in facts.pass_.results:
        layout, heads = facts.layout(tensor), facts.problem.heads_of(tensor)
        for chunk, owner in enumerate(layout.owners):
            whole = (0, len(layout.chunks[chunk]), 0, heads)
            if not area(whole):
                continue
            values = found[tensor, chunk]
            if sum(area(region_of(value)) for value in values) != area(whole) or not covered(
                whole, [region_of(value) for value in values]
            ):
                raise facts.fail(
                    "results",
                    f"{tensor} of chunk {chunk} does not reach its owner, rank {owner}, whole and "
                    "once",
                )
            line = facts.line_blocks[tensor.by_key, chunk]
            for value in values:
                expected = {
                    block
                    for (start, stop), blocks in line.items()
                    if start < value.head_stop and value.head_start < stop
                    for block in blocks
                }
                if set(value.cover) != expected:
                    raise facts.fail(
                        "results",
                        f"{value.place()} holds blocks {sorted(value.cover)}, expected "
                        f"{sorted(expected)}",
                    )


COVER_RULES = (
    each_block_computed_once,
    inputs_complete,
    tile_outputs_complete,
    merges_disjoint,
    partials_used_once,
    results_complete,
)
