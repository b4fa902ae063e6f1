"""Checks that values come from one task, stand where they are used, and reach who they are for."""

from __future__ import annotations

from collections import Counter

from ultraattn.plans.account import parts_by_target, reads_by_chunk
from ultraattn.plans.check.facts import Facts, is_scatter
from ultraattn.plans.program import Collective, Compute, Local, LocalOp, Merge, Task, Transfer
from ultraattn.plans.tensors import Tensor

PARTNER = {Tensor.O: Tensor.LSE, Tensor.LSE: Tensor.O}


def values_have_one_source(facts: Facts) -> None:
    """A value is written by one task, or is an input that its rank owns or keeps from forward."""
    writer: dict[int, int] = {}
    for task in facts.tasks:
        for number in task.writes:
            if number in writer:
                raise facts.fail(
                    "one source a value",
                    f"value {number} is written by {facts.name(writer[number])} and "
                    f"{facts.name(task.index)}",
                )
            writer[number] = task.index
    for index, value in enumerate(facts.values):
        if index in writer:
            continue
        owner = facts.layout(value.tensor).owners[value.chunk]
        owned = value.tensor in facts.pass_.inputs and value.rank == owner
        if not (owned or facts.kept[index] >= 0) or value.cover or value.wide:
            raise facts.fail(
                "one source a value",
                f"nothing writes {value.place()}, and it is no input that the rank owns"
                + (" or keeps from forward" if facts.forward is not None else ""),
            )


def places(facts: Facts) -> None:
    """A task uses values of its own rank; a transfer carries what it delivers, to others."""
    for task in facts.tasks:
        if isinstance(task, Transfer):
            _both_ends_of_transfer(facts, task)
        elif isinstance(task, Collective):
            _both_ends_of_collective(facts, task)
        else:
            for number in (*task.reads, *task.writes):
                if facts.values[number].rank != task.rank:
                    raise facts.fail(
                        "places",
                        f"{facts.name(task.index)} uses {facts.values[number].place()}, "
                        "which is on another rank",
                    )


def _both_ends_of_transfer(facts: Facts, task: Transfer) -> None:
    for number in task.reads:
        if facts.values[number].rank != task.rank:
            raise facts.fail(
                "places",
                f"{facts.name(task.index)} sends {facts.values[number].place()}, which is on "
                "another rank",
            )
    for number in task.writes:
        if facts.values[number].rank == task.rank:
            raise facts.fail(
                "places",
                f"{facts.name(task.index)} sends {facts.values[number].place()} to its own rank",
            )
    _copies(facts, task)


def _both_ends_of_collective(facts: Facts, task: Collective) -> None:
    members = {facts.values[number].rank for number in (*task.reads, *task.writes)}
    if not members or task.rank != min(members):
        raise facts.fail(
            "places",
            f"{facts.name(task.index)} has members {sorted(members)}; it stands at its lowest",
        )
    if not is_scatter(task):
        _copies(facts, task)
        return
    values = dict(enumerate(facts.values))
    into = Counter(part for parts in parts_by_target(values, task).values() for part in parts)
    for number in task.reads:
        if into[number] != 1:
            raise facts.fail(
                "both ends",
                f"{facts.name(task.index)} must scatter {values[number].place()} to exactly one "
                f"of its targets, not {into[number]}: parts have the extent of their target",
            )


def _copies(facts: Facts, task: Task) -> None:
    """Every value written is part of one that is read, and none is read for nobody."""
    used: set[int] = set()
    by_chunk = reads_by_chunk(facts.values, task.reads)
    for number in task.writes:
        value = facts.values[number]
        reads = by_chunk[value.tensor, value.chunk]
        sources = [read for read in reads if facts.values[read].holds(value)]
        if not sources:
            raise facts.fail(
                "both ends",
                f"{facts.name(task.index)} delivers {value.place()}, which it does not carry",
            )
        used.update(sources)
    for number in task.reads:
        if number not in used:
            raise facts.fail(
                "both ends",
                f"{facts.name(task.index)} sends {facts.values[number].place()}, nobody receives "
                "it",
            )


def work_fits_values(facts: Facts) -> None:
    """A task writes what its kind makes; O and its LSE are made and merged together."""
    for task in facts.tasks:
        merges = isinstance(task, Merge) or is_scatter(task)
        fills = isinstance(task, Local) and task.op is LocalOp.FILL
        delta = isinstance(task, Local) and task.op is LocalOp.DELTA
        for number in task.writes:
            value = facts.values[number]
            wrong = (
                ((merges or fills) and value.tensor not in facts.pass_.results)
                or (fills and (value.cover or task.reads))
                or (delta and value.tensor is not Tensor.DELTA)
            )
            if wrong:
                op = f" {task.op}" if isinstance(task, (Local, Collective)) else ""
                raise facts.fail(
                    "work", f"{facts.name(task.index)}{op} cannot make {value.place()}"
                )
        if merges or isinstance(task, Compute):
            _o_with_lse(facts, task, merges)


def _o_with_lse(facts: Facts, task: Task, merges: bool) -> None:
    """Each O that is made has its LSE of the same extent, and so has each part that is merged."""
    written = [facts.values[number] for number in task.writes]
    for value in written:
        partner = PARTNER.get(value.tensor)
        extents = [
            (v.chunk, v.row_start, v.row_stop, v.head_start, v.head_stop, v.rank, v.cover)
            for v in (value, *(other for other in written if other.tensor is partner))
        ]
        if partner is not None and extents.count(extents[0]) != 2:
            raise facts.fail(
                "work",
                f"{facts.name(task.index)} makes {value.place()} without one {partner} of the "
                "same extent and blocks",
            )
    if not merges:
        return
    reads = [facts.values[number] for number in task.reads]
    lses = [read for read in reads if read.tensor is Tensor.LSE]
    for o in (read for read in reads if read.tensor is Tensor.O):
        if not any(
            (lse.chunk, lse.cover, lse.rank) == (o.chunk, o.cover, o.rank)
            and lse.row_start <= o.row_start
            and o.row_stop <= lse.row_stop
            and lse.head_start <= o.head_start
            and o.head_stop <= lse.head_stop
            for lse in lses
        ):
            raise facts.fail(
                "work", f"{facts.name(task.index)} merges {o.place()} without its {Tensor.LSE}"
            )


PLACE_RULES = (values_have_one_source, places, work_fits_values)
