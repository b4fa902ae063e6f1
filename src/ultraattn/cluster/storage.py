"""Turns clusters into JSON files and back, strictly: every key known, every number in place."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ultraattn.cluster.costs import Costs, Kernel
from ultraattn.cluster.tables import KernelTable, Link
from ultraattn.errors import InputError

SCHEMA = 1
MAX_BYTES = 16 * 2**20
KINDS = ("full", "causal", "partial")
PASSES = ("forward", "backward")


def costs_to_json(costs: Costs) -> dict[str, Any]:
    """Plain data; times of tables in microseconds."""
    return {
        "head_dim": costs.head_dim,
        "dtype": costs.dtype,
        "dtype_factors": dict(costs.dtype_factors),
        "kernels": [
            {
                "name": k.name,
                "block_sets": k.block_sets,
                "partial_over_full": k.partial_over_full,
                "tables": [
                    {
                        "pass": t.pass_,
                        "kind": t.kind,
                        "columns": ["q_tokens", "kv_tokens", "heads", "us"],
                        "rows": [[q, kv, h, _us(s)] for q, kv, h, s in t.rows],
                    }
                    for t in k.tables
                ],
            }
            for k in costs.kernels
        ],
        "links": {"inside": _link_json(costs.inside), "between": _link_json(costs.between)},
        "nics_per_node": costs.nics_per_node,
        "memory_bytes_per_s": costs.memory_bytes_per_s,
        "local_start_us": _us(costs.local_start_s),
        "launch_us": _us(costs.launch_s),
        "compute_rate": dict(costs.compute_rate),
        "host_serial": costs.host_serial,
        "cores_per_node": costs.cores_per_node,
        "measured": costs.measured,
        "notes": list(costs.notes),
    }


def _us(seconds: float) -> float:
    """Microseconds, rounded past the twelfth digit so that reading gives the same seconds."""
    return float(f"{seconds * 1e6:.12g}")


def _link_json(link: Link) -> dict[str, Any]:
    return {
        "transport": link.transport,
        "launch_us": _us(link.launch_s),
        "columns": ["bytes", "us"],
        "rows": [[size, _us(seconds)] for size, seconds in link.rows],
    }


class Reader:
    """Reads one JSON object, key by key; `done` refuses keys that nobody asked for."""

    def __init__(self, data: Any, where: str) -> None:
        if not isinstance(data, Mapping):
            raise InputError(f"{where}: expected an object, got {type(data).__name__}")
        self._data = dict(data)
        self.where = where

    def has(self, key: str) -> bool:
        """Whether `key` holds something; takes it away where it holds null."""
        if key in self._data and self._data[key] is None:
            del self._data[key]
            return False
        return True

    def take(self, key: str, kind: type) -> Any:
        """The value of `key`, of that type; an int serves as a float, a bool as nothing else."""
        if key not in self._data:
            raise InputError(f"{self.where}: {key!r} is missing")
        value = self._data.pop(key)
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind or (isinstance(value, float) and not math.isfinite(value)):
            raise InputError(
                f"{self.where}: {key} is {value!r}, expected {kind.__name__}"
                f"{' (finite)' if kind is float else ''}"
            )
        return value

    def number(self, key: str, least: float, kind: type = float) -> Any:
        """A number of at least `least`."""
        value = self.take(key, kind)
        if value < least:
            raise InputError(f"{self.where}: {key} is {value}, expected at least {least}")
        return value

    def rows(self, key: str, integers: int) -> list[tuple[Any, ...]]:
        """Rows of `integers` integers and one time in microseconds, which becomes seconds."""
        out = []
        for number, row in enumerate(self.take(key, list)):
            good = (
                isinstance(row, list)
                and len(row) == integers + 1
                and all(type(x) is int for x in row[:-1])
                and _is_finite(row[-1])
            )
            if not good:
                raise InputError(
                    f"{self.where}: row {number} of {key} is {row!r}, expected {integers} "
                    "integers and microseconds"
                )
            out.append((*row[:-1], row[-1] / 1e6))
        return out

    def factors(self, key: str) -> tuple[tuple[str, float], ...]:
        """An object of positive numbers."""
        inner = Reader(self.take(key, dict), f"{self.where}, {key}")
        return tuple((name, inner.number(name, 1e-9)) for name in sorted(inner._data))

    def done(self) -> None:
        """Raises InputError where keys are left."""
        if self._data:
            raise InputError(f"{self.where}: unknown {', '.join(map(repr, sorted(self._data)))}")


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and type(value) is not bool and math.isfinite(value)


def costs_from_json(data: Any, where: str) -> Costs:
    """The costs that `costs_to_json` wrote.

    Raises:
        InputError: says which entry is missing, unknown or of another type.
    """
    r = Reader(data, where)
    links = Reader(r.take("links", dict), f"{where}, links")
    inside = _link(links.take("inside", dict), f"{where}, links, inside")
    between = _link(links.take("between", dict), f"{where}, links, between")
    links.done()
    costs = Costs(
        head_dim=r.number("head_dim", 1, int),
        dtype=r.take("dtype", str),
        dtype_factors=r.factors("dtype_factors"),
        kernels=tuple(
            _kernel(x, f"{where}, kernel {i}") for i, x in enumerate(r.take("kernels", list))
        ),
        inside=inside,
        between=between,
        nics_per_node=r.number("nics_per_node", 1, int),
        memory_bytes_per_s=r.number("memory_bytes_per_s", 1.0),
        local_start_s=r.number("local_start_us", 0.0) / 1e6,
        launch_s=r.number("launch_us", 0.0) / 1e6,
        compute_rate=r.factors("compute_rate"),
        host_serial=r.take("host_serial", bool),
        cores_per_node=r.number("cores_per_node", 0, int),
        measured=r.take("measured", bool),
        notes=tuple(str(note) for note in r.take("notes", list)),
    )
    r.done()
    return costs


def _link(data: Any, where: str) -> Link:
    r = Reader(data, where)
    r.take("columns", list)
    transport, launch_s = r.take("transport", str), r.number("launch_us", 0.0) / 1e6
    link = Link(transport, launch_s, tuple(r.rows("rows", 1)))
    r.done()
    return link


def _kernel(data: Any, where: str) -> Kernel:
    r = Reader(data, where)
    ratio = r.number("partial_over_full", 1e-9) if r.has("partial_over_full") else None
    kernel = Kernel(
        name=r.take("name", str),
        block_sets=r.take("block_sets", bool),
        partial_over_full=ratio,
        tables=tuple(
            _table(x, f"{where}, table {i}") for i, x in enumerate(r.take("tables", list))
        ),
    )
    r.done()
    return kernel


def _table(data: Any, where: str) -> KernelTable:
    r = Reader(data, where)
    r.take("columns", list)
    pass_, kind = r.take("pass", str), r.take("kind", str)
    if pass_ not in PASSES or kind not in KINDS:
        raise InputError(
            f"{where}: {pass_} {kind}, expected one of {', '.join(PASSES)} and of "
            f"{', '.join(KINDS)}"
        )
    table = KernelTable(pass_, kind, tuple(r.rows("rows", 3)))
    r.done()
    return table


def read_json(path: Path) -> Any:
    """A JSON file of bounded size.

    Raises:
        InputError: it cannot be read, is too large, or is no JSON.
    """
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise InputError(f"{path}: {size} bytes, expected at most {MAX_BYTES}")
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; pass a preset or a readable file") from error
    except ValueError as error:
        raise InputError(f"{path}: no cluster file: {error}") from error


def write_json(path: Path, data: Any) -> None:
    """Writes one line a row of a table and a line a key, so that files can be compared."""
    text = json.dumps(data, separators=(", ", ": "))
    for mark in ("], [", "}, {", '], "', '}, "'):
        text = text.replace(mark, mark[:3].strip() + "\n" + mark[3:])
    path.write_text(text + "\n", encoding="utf-8")
