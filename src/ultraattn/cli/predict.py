"""Turns options into the simulated times of every strategy, side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table

from ultraattn import planning
from ultraattn.cli.arguments import arguments_of, mask_of
from ultraattn.cli.options import PlanOptions
from ultraattn.cli.steps import Steps
from ultraattn.errors import InputError
from ultraattn.plans import Plan
from ultraattn.simulation import Simulation
from ultraattn.simulation import simulate as simulate_plan
from ultraattn.strategies import NAMES as RIVALS

OWN = ("auto", "tile", "rows")


@dataclass(frozen=True)
class Row:
    """One strategy, planned and simulated."""

    name: str
    plan: Plan
    simulation: Simulation

    @property
    def chosen(self) -> str:
        """The strategy of each pass, where both agree one name."""
        names = (self.plan.forward.strategy, self.plan.backward.strategy)
        return names[0] if names[0] == names[1] else " / ".join(names)


@dataclass(frozen=True)
class Prediction:
    """All strategies of one attention, fastest first; and those that cannot serve it."""

    rows: tuple[Row, ...]
    refused: dict[str, str]
    notes: tuple[str, ...]

    @property
    def auto(self) -> Row:
        """What strategy auto gives."""
        return next(row for row in self.rows if row.name == "auto")

    def facts(self) -> dict[str, Any]:
        """What `--json` prints; times are seconds."""
        auto = self.auto
        return {
            **auto.plan.facts(),
            "cluster": auto.simulation.cluster,
            "strategies": {row.name: row.simulation.makespan_s for row in self.rows},
            "forward": {row.name: row.simulation.forward.makespan_s for row in self.rows},
            "backward_strategies": {
                row.name: row.simulation.backward.makespan_s for row in self.rows
            },
            "layouts": {row.name: row.plan.layout.name for row in self.rows},
            "efficiency": {
                row.name: [row.simulation.forward.efficiency, row.simulation.backward.efficiency]
                for row in self.rows
            },
            "chosen": auto.chosen,
            "refused": self.refused,
        }


def predict(options: PlanOptions, steps: Steps, ranks: int | None = None) -> Prediction:
    """Plans and simulates all strategies, or auto and the one that `--strategy` names.

    Args:
        options: as typed.
        steps: shows which strategy is under way.
        ranks: the ranks where no option says.

    Raises:
        InputError: an option cannot be served, or the cluster has no costs.
    """
    mask, arguments = mask_of(options), arguments_of(options, ranks=ranks)
    asked = arguments.pop("strategy", None)
    names = [*OWN, *RIVALS] if asked in (None, "auto") else ["auto", str(asked)]
    rows, refused = [], {}
    for name in names:
        with steps.step(name):
            try:
                made = planning.plan(mask, strategy=name, **arguments)
            except InputError as error:
                # Only a rival's own refusal is an answer; all else is wrong for auto as well.
                if name not in RIVALS:
                    raise
                refused[name] = str(error)
                continue
            rows.append(Row(name, made, simulate_plan(made, arguments["cluster"])))
    rows.sort(key=lambda row: row.simulation.makespan_s)
    auto = next(row for row in rows if row.name == "auto")
    notes = (
        *(f"{name} cannot serve: {reason}" for name, reason in refused.items()),
        f"auto: {auto.chosen}, layout {auto.plan.layout.name}, simulated on "
        f"{auto.simulation.cluster}",
    )
    return Prediction(tuple(rows), refused, notes)


def prediction_table(found: Prediction) -> Table:
    """A row a strategy, the fastest first; `bound` is the share of the time that none can beat."""
    problem = found.auto.plan.problem
    title = f"{problem.mask_label}: {problem.q_len:,} tokens, {found.auto.plan.ranks} ranks, ms"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for column in ("strategy", "layout"):
        table.add_column(column, no_wrap=True)
    for column in ("forward", "backward", "both", "x auto", "bound"):
        table.add_column(column, justify="right", no_wrap=True)
    least = found.auto.simulation.makespan_s
    for row in found.rows:
        both = row.simulation
        bound = both.forward.bound_s + both.backward.bound_s
        table.add_row(
            row.name,
            row.plan.layout.name,
            f"{both.forward.makespan_s * 1e3:.3f}",
            f"{both.backward.makespan_s * 1e3:.3f}",
            f"{both.makespan_s * 1e3:.3f}",
            f"{both.makespan_s / least:.2f}" if least else "",
            f"{bound / both.makespan_s:.0%}" if both.makespan_s else "",
            style="bold" if row.name == "auto" else None,
        )
    return table
