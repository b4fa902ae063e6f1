"""Clusters: presets, files, sizes, and what is said of costs that are missing."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from ultraattn.cluster import PRESETS, Cluster
from ultraattn.errors import InputError


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_a_file(name: str, tmp_path: Path) -> None:
    cluster = Cluster.load(name).resize(3, 4)
    cluster.save(tmp_path / "c.json")
    again = Cluster.load(tmp_path / "c.json")
    assert again == cluster
    assert hash(again) == hash(cluster)
    assert again.ranks == 12


def test_a_cluster_without_costs_survives_a_file_and_says_how_to_get_them(tmp_path: Path) -> None:
    cluster = Cluster("mine", 2, 4, align=128)
    cluster.save(tmp_path / "c.json")
    assert Cluster.load(tmp_path / "c.json") == cluster
    with pytest.raises(InputError, match="'mine' has no costs; measure it with `ultraattn profile"):
        _ = cluster.known_costs


def test_only_the_cpu_is_a_guess_and_says_so() -> None:
    for name in PRESETS:
        costs = Cluster.load(name).known_costs
        assert costs.measured == (name != "cpu")
        assert costs.notes


def test_unknown_names_list_the_presets() -> None:
    with pytest.raises(InputError, match="expected one of cpu, a800, h100, h800, h200"):
        Cluster.load("h300")


@pytest.mark.parametrize("size", [(0, 4), (2, -1)])
def test_no_nodes_or_ranks_are_refused(size: tuple[int, int]) -> None:
    with pytest.raises(InputError, match="at least one of each"):
        Cluster.load("cpu").resize(*size)


def saved(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    path = tmp_path / "c.json"
    Cluster.load("h100").save(path)
    return path, json.loads(path.read_text())


@pytest.mark.parametrize(
    ("where", "value", "said"),
    [
        (("schema",), 2, "schema 2, this version reads 1"),
        (("nodes",), 1.5, "nodes is 1.5, expected int"),
        (("nodes",), True, "nodes is True, expected int"),
        (("costs", "memory_bytes_per_s"), "fast", "expected float"),
        (("costs", "colour"), "red", "unknown 'colour'"),
        (("costs", "nics_per_node"), 0, "expected at least 1"),
        (("costs", "links", "inside", "rows"), [[1, "x"]], "row 0 of rows"),
        (("costs", "kernels", 0, "tables", 0, "pass"), "sideways", "sideways full"),
    ],
)
def test_damaged_files_are_refused_with_the_entry(
    tmp_path: Path, where: tuple[Any, ...], value: Any, said: str
) -> None:
    path, data = saved(tmp_path)
    at = data
    for key in where[:-1]:
        at = at[key]
    at[where[-1]] = value
    path.write_text(json.dumps(data))
    with pytest.raises(InputError, match=said):
        Cluster.load(path)


def test_missing_entries_and_broken_json_are_refused(tmp_path: Path) -> None:
    path, data = saved(tmp_path)
    del data["costs"]["links"]["between"]
    path.write_text(json.dumps(data))
    with pytest.raises(InputError, match="links: 'between' is missing"):
        Cluster.load(path)
    path.write_text("{")
    with pytest.raises(InputError, match="no cluster file"):
        Cluster.load(path)


class TestMissingCosts:
    costs = Cluster.load("h100").known_costs

    def test_a_kernel(self) -> None:
        with pytest.raises(InputError, match=r"no costs of kernel 'fa9'.*there are: fa2.*profile"):
            self.costs.seconds(64, 64, 1, kernel="fa9")

    def test_a_kind_and_pass(self) -> None:
        kernel = self.costs.kernels[0]
        only = dataclasses.replace(kernel, tables=kernel.tables[:1], partial_over_full=None)
        costs = dataclasses.replace(self.costs, kernels=(only,))
        assert costs.seconds(64, 64, 1) > 0
        with pytest.raises(
            InputError, match=r"'fa2' for causal blocks in the forward pass.*profile"
        ):
            costs.seconds(64, 64, 1, "causal")
        with pytest.raises(InputError, match="for full blocks in the backward pass"):
            costs.seconds(64, 64, 1, pass_="backward")
        with pytest.raises(InputError, match="for partial blocks"):
            costs.seconds(64, 64, 1, "partial")

    def test_a_dtype(self) -> None:
        with pytest.raises(InputError, match="no costs of kernels in int8"):
            self.costs.width_factor(128, 128, "int8")


def test_work_scales_with_widths_and_slower_dtypes() -> None:
    costs = Cluster.load("a800").known_costs
    assert costs.width_factor(128, 128, "bfloat16") == 1
    assert costs.width_factor(64, 64, "float16") == 0.5
    assert costs.width_factor(192, 64, "bfloat16") == 1
    assert costs.width_factor(128, 128, "float32") == 15
