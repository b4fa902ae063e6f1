"""Turns what `choose` has compared into the passes of a plan: bounded, arranged, with notes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from ultraattn.planning.assign import TileOptions, bounded
from ultraattn.planning.candidates import Case, Field, Option
from ultraattn.planning.passes import arranged, with_volume
from ultraattn.planning.setting import Setting
from ultraattn.planning.tiling import Effort
from ultraattn.plans.account import account
from ultraattn.plans.plan import PassPlan
from ultraattn.strategies import NAMES as RIVALS

TIE = 0.01
"""Simulated times within 1 % of the best count as equal (issue "Predict and choose")."""
NAMED = 8
"""Simulated candidates that the notes name, the fastest first."""


def picked(case: Case, below_ns: float) -> list[Option]:
    """Of each pass the least traffic within 1 % of the best; the best where that takes too long.

    `below_ns` is what both passes together may take: the time of a rival, or of `tile`.
    """
    picked = []
    for one in case.fields:
        near = [o for o in one.simulated if o.known_ns <= one.best_ns * (1 + TIE)]
        picked.append(min(near, key=lambda o: (_traffic(one, o), o.known_ns)))
    if sum(option.known_ns for option in picked) > below_ns:
        return [one.simulated[0] for one in case.fields]
    return picked


def _traffic(one: Field, option: Option) -> int:
    assert option.part is not None
    costs = account(one.made.problem, option.part.program, one.where.place.node_of)
    return int(costs.sent.sum())


def finished(one: Field, option: Option, others: Sequence[Case], options: TileOptions) -> PassPlan:
    """The chosen pass with its volume, its bound, and what was considered."""
    part = option.part
    assert part is not None
    if option.rival:
        part = with_volume(one.made, one.where, part)
    elif option.assignment is not None and options.effort is not Effort.INSTANT:
        if not option.bounded:
            known = bounded(one.pass_, one.made, options, option.assignment)
            part = dataclasses.replace(part, bounds=known)
        part = arranged(
            one.pass_, one.made, one.where, part, option.assignment, options.effort, option.ways
        )
    notes = [*part.notes, *_report(one, others), *_refused(one.made)]
    return dataclasses.replace(part, notes=tuple(notes))


def _report(one: Field, others: Sequence[Case]) -> list[str]:
    """What was considered, in a few lines."""
    times = one.simulated
    more = f", and {len(times) - NAMED} slower" if len(times) > NAMED else ""
    named = ", ".join(f"{o.label} {o.known_ns / 1e6:.3f} ms" for o in times[:NAMED])
    notes = [f"simulated: {named}{more}"]
    left = sorted((o for o in one.options if o.part is None), key=lambda o: o.floor_ns)
    rivals = ", ".join(f"{o.label} >= {o.floor_ns / 1e6:.3f} ms" for o in left if o.rival)
    if rivals:
        notes.append(f"left out, slower at the least: {rivals}")
    own = sum(not o.rival for o in left)
    if own:
        notes.append(f"left out by their floors: {own} other assignments of tiles")
    for case in others:
        layout = case.made.q_layout
        exact = case.best_ns < np.inf
        total = (case.best_ns if exact else case.least_ns) / 1e6
        notes.append(
            f"layout {layout.name} of {len(layout.chunks)} chunks: both passes "
            f"{'' if exact else '>= '}{total:.3f} ms"
        )
    return notes


def _refused(made: Setting) -> list[str]:
    """Why rivals cannot serve at all."""
    ranks = made.q_layout.ranks
    return [
        f"left out: {reason}"
        for rival in RIVALS.values()
        if not rival.variants(made.problem, ranks)
        and (reason := rival.refusal(made.problem, ranks)) is not None
    ]
