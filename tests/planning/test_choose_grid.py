"""A fixed part of the grid of simulated cells (`benchmarks/predict.py`), and its bookkeeping."""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "predict.py"
PROBLEMS = [
    ("sliding_window", 4, 8192, (8, 1)),
    ("star", 2, 65536, (32, 8)),
    ("document", 4, 8192, (32, 32)),
    ("causal", 2, 8192, (1, 1)),
]


@pytest.fixture(scope="module")
def predict() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_predict", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_cells_are_never_slower_than_rivals_nor_faster_than_the_bound(predict: ModuleType) -> None:
    found = [cell for problem in PROBLEMS for cell in predict.cells(problem, "fast")]
    assert len(found) == len(PROBLEMS) * len(predict.PRESETS)
    assert predict.report(found)["losing"] == []
    for cell in found:
        assert cell["time_s"] >= cell["bound_s"] * 0.999, predict.key(cell)
    assert any(cell["time_s"] < cell["rival_s"] for cell in found)


def test_the_grid_is_whole_and_its_order_fixed(predict: ModuleType) -> None:
    order = predict.problems()
    assert len(order) == len(set(order)) == 8 * 6 * 3 * 4
    assert order == predict.problems()
    assert len({problem[0] for problem in order[:48]}) == len(predict.MASKS)


def test_a_line_cut_short_is_read_as_not_done(predict: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "cells.jsonl"
    cell = {"mask": "full", "ranks": 2}
    file.write_text(json.dumps(cell) + "\n" + json.dumps(cell)[:9])
    assert predict.read(file) == [cell]


def test_cells_of_other_states_of_the_planner_are_not_counted(predict: ModuleType) -> None:
    cells = [{"at": 0}, {"at": 1, "state": "a"}, {"at": 2, "state": "b"}]
    assert [cell["at"] for cell in predict.of_state(cells, "a")] == [1]
    assert [cell["at"] for cell in predict.of_state(cells, predict.UNKNOWN)] == [0]
    assert predict.state() == predict.state()


def test_processes_give_the_cells_that_were_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARK.parent))
    predict = importlib.import_module("predict")
    file = tmp_path / "cells.jsonl"
    predict.run(file, "fast", [(("full", 2, 8192, (1, 1)), ["h100"])], 1.0, 1)
    (cell,) = predict.of_state(predict.read(file), predict.state())
    assert predict.key(cell) == ("full", 2, 8192, 1, 1, "h100")
