"""Turns a plan into one canonical JSON file and back: strict, versioned, a digest a section."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ultraattn.chunks import Chunk, Chunks
from ultraattn.errors import PlanError, UltraAttnError
from ultraattn.plans.columns import Ragged, column
from ultraattn.plans.layout import Layout
from ultraattn.plans.plan import Bounds, PassPlan, Place, Plan
from ultraattn.plans.problem import Problem
from ultraattn.plans.program import (
    BlockColumns,
    BufferColumns,
    Program,
    StreamColumns,
    TaskColumns,
    ValueColumns,
)

FORMAT = "ultraattn-plan"
VERSION = 1
MAX_FILE_BYTES = 2**31
MAX_CELLS = 2**28
"""Most integers in one column, so that a damaged file cannot ask for all memory."""

T = TypeVar("T")


def canonical(data: Any) -> str:
    """JSON with sorted keys and no spaces: one text for one value."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)


def sha256(data: Any) -> str:
    """The digest of a value's canonical JSON."""
    return hashlib.sha256(canonical(data).encode()).hexdigest()


def sections(plan: Plan) -> dict[str, Any]:
    """The plan as JSON values, by section."""
    return {
        "problem": dataclasses.asdict(plan.problem),
        "place": dataclasses.asdict(plan.place),
        "layouts": {"q": _layout_json(plan.q_layout), "kv": _layout_json(plan.kv_layout)},
        "forward": _pass_json(plan.forward),
        "backward": _pass_json(plan.backward),
        "versions": dict(plan.versions),
    }


def plan_digest(plan: Plan) -> str:
    """The digest of a plan: over the digests of its sections."""
    return sha256({name: sha256(section) for name, section in sections(plan).items()})


def dumps(plan: Plan) -> str:
    """The text of a plan's file."""
    parts = sections(plan)
    digests = {name: sha256(part) for name, part in parts.items()}
    return (
        canonical(
            {
                "format": FORMAT,
                "version": VERSION,
                "digests": digests,
                "digest": sha256(digests),
                **parts,
            }
        )
        + "\n"
    )


def save_plan(plan: Plan, path: Path) -> None:
    """Checks a plan, then writes its file in one step."""
    plan.check()
    part = path.with_name(path.name + ".part")
    part.write_text(dumps(plan), encoding="utf-8")
    part.replace(path)


def load_plan(path: Path) -> Plan:
    """Reads and checks a plan's file."""
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise PlanError(f"{path}: {size} bytes, a plan file has at most {MAX_FILE_BYTES}")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise PlanError(
            f"{path}: not text at byte {error.start}; the file is damaged or no plan: "
            "make the plan again, or copy it again"
        ) from None
    return loads(text, str(path))


def loads(text: str, name: str = "plan") -> Plan:
    """Reads a plan from the text of its file; `name` stands in messages."""
    read = _Reader(name)
    try:
        data = json.loads(text, object_pairs_hook=read.unique, parse_constant=read.no_number)
    except RecursionError:
        raise PlanError(f"{name}: lists nest too deep for a plan; make the plan again") from None
    except json.JSONDecodeError as error:
        raise PlanError(
            f"{name}: not whole JSON at line {error.lineno}, column {error.colno} ({error.msg}); "
            "the file is truncated or damaged: make the plan again, or copy it again"
        ) from None
    fields = {f.name for f in dataclasses.fields(Plan)} - {"q_layout", "kv_layout"}
    top = read.mapping(data, "", {"format", "version", "digests", "digest", "layouts", *fields}, 2)
    if top.get("format") != FORMAT:
        raise read.error("format", f"is {top.get('format')!r}, expected {FORMAT!r}")
    version = top.get("version")
    if type(version) is not int or version != VERSION:
        newer = type(version) is int and version > VERSION
        raise read.error(
            "version",
            f"is {version!r}, this library reads {VERSION}; "
            + ("upgrade ultraattn" if newer else "make the plan again"),
        )
    read.mapping(data, "", {"format", "version", "digests", "digest", "layouts", *fields})
    names = fields | {"layouts"}
    digests = read.mapping(top["digests"], "digests", names)
    for section in sorted(names):
        if sha256(top[section]) != digests[section]:
            raise read.error(section, "does not match its digest: the file was edited or damaged")
    if sha256(digests) != top["digest"]:
        raise read.error("digest", "does not match the sections' digests: the file was edited")
    try:
        plan = _plan(read, top)
        plan.check()
    except UltraAttnError as error:
        text = str(error)
        raise PlanError(text if text.startswith(name) else f"{name}: {text}") from error
    return plan


def _plan(read: _Reader, top: dict[str, Any]) -> Plan:
    problem = read.record(Problem, top["problem"], "problem")
    place = read.record(Place, top["place"], "place")
    if place.nodes < 1 or place.gpus_per_node < 1:
        raise read.error("place", f"must have a node and a rank, is {place}")
    layouts = read.mapping(top["layouts"], "layouts", {"q", "kv"})
    versions = top["versions"]
    if not isinstance(versions, dict) or not all(isinstance(v, str) for v in versions.values()):
        raise read.error("versions", "must map names to version strings")
    return Plan(
        problem,
        place,
        _read_layout(read, layouts["q"], "layouts.q", place.ranks),
        _read_layout(read, layouts["kv"], "layouts.kv", place.ranks),
        _read_pass(read, top["forward"], "forward"),
        _read_pass(read, top["backward"], "backward"),
        tuple(sorted(versions.items())),
    )


def _layout_json(layout: Layout) -> dict[str, Any]:
    return {
        "name": layout.name,
        "length": layout.length,
        "chunks": [[c.start, c.stop, c.step] for c in layout.chunks],
        "owners": list(layout.owners),
    }


def _read_layout(read: _Reader, data: Any, where: str, ranks: int) -> Layout:
    fields = read.mapping(data, where, {"name", "length", "chunks", "owners"})
    owners = read.ints(fields["owners"], f"{where}.owners").tolist()
    name, length = read.text(fields["name"], f"{where}.name"), fields["length"]
    if not isinstance(fields["chunks"], list) or type(length) is not int or length < 0:
        raise read.error(where, "needs a length and a list of chunks")
    chunks = []
    for index, item in enumerate(fields["chunks"]):
        values = read.ints(item, f"{where}.chunks[{index}]").tolist()
        if len(values) != 3:
            raise read.error(f"{where}.chunks[{index}]", "must be [start, stop, step]")
        chunks.append(Chunk(*values))
    return Layout(name, Chunks.make(length, chunks), tuple(owners), ranks)


def _pass_json(part: PassPlan) -> dict[str, Any]:
    program = part.program
    return {
        "strategy": part.strategy,
        "head_groups": part.head_groups,
        "bounds": dataclasses.asdict(part.bounds),
        "notes": list(part.notes),
        "predicted_ns": part.predicted_ns,
        "program": {
            f.name: _columns_json(getattr(program, f.name)) for f in dataclasses.fields(program)
        },
    }


def _columns_json(columns: Any) -> dict[str, Any]:
    out = {}
    for field in dataclasses.fields(columns):
        value = getattr(columns, field.name)
        out[field.name] = value.to_json() if isinstance(value, Ragged) else value.tolist()
    return out


def _read_pass(read: _Reader, data: Any, where: str) -> PassPlan:
    fields = read.mapping(
        data, where, {"strategy", "head_groups", "bounds", "notes", "predicted_ns", "program"}
    )
    kinds: dict[str, type[Any]] = {
        "blocks": BlockColumns,
        "values": ValueColumns,
        "tasks": TaskColumns,
        "streams": StreamColumns,
        "buffers": BufferColumns,
    }
    columns = read.mapping(fields["program"], f"{where}.program", set(kinds))
    program = Program(
        **{
            name: read.columns(kind, columns[name], f"{where}.program.{name}")
            for name, kind in kinds.items()
        }
    )
    groups, notes, time = fields["head_groups"], fields["notes"], fields["predicted_ns"]
    if time is not None and type(time) is not int:
        raise read.error(f"{where}.predicted_ns", f"must be an integer or null, is {time!r}")
    if type(groups) is not int:
        raise read.error(f"{where}.head_groups", f"must be an integer, is {groups!r}")
    if not isinstance(notes, list):
        raise read.error(f"{where}.notes", "must be a list of texts")
    return PassPlan(
        read.text(fields["strategy"], f"{where}.strategy"),
        groups,
        read.record(Bounds, fields["bounds"], f"{where}.bounds"),
        tuple(read.text(note, f"{where}.notes[{i}]") for i, note in enumerate(notes)),
        program,
        time,
    )


class _Reader:
    """Reads JSON values strictly; every error names its place in the file."""

    def __init__(self, name: str) -> None:
        self._name = name

    def error(self, where: str, text: str) -> PlanError:
        return PlanError(f"{self._name}: {where} {text}")

    def unique(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """An object in which no key stands twice."""
        made = dict(pairs)
        if len(made) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise PlanError(f"{self._name}: an object names {twice!r} twice: the file was edited")
        return made

    def no_number(self, name: str) -> Any:
        """Refuses NaN and infinities, which JSON does not have."""
        raise PlanError(f"{self._name}: holds {name}, which is no JSON number")

    def text(self, data: Any, where: str) -> str:
        """A text."""
        if not isinstance(data, str):
            raise self.error(where, f"must be a text, is {data!r}")
        return data

    def mapping(
        self, data: Any, where: str, keys: set[str], at_least: int | None = None
    ) -> dict[str, Any]:
        """An object with exactly `keys`; with `at_least`, only that many of them are needed."""
        place = where or "the file"
        if not isinstance(data, dict):
            raise self.error(place, f"must be an object, is {type(data).__name__}")
        if at_least is None:
            unknown, missing = sorted(data.keys() - keys), sorted(keys - data.keys())
            if unknown or missing:
                raise self.error(place, f"has unknown keys {unknown}, lacks keys {missing}")
        return data

    def ints(self, data: Any, where: str) -> np.ndarray[Any, np.dtype[np.int64]]:
        """A column of integers."""
        if not isinstance(data, list) or len(data) > MAX_CELLS:
            raise self.error(where, f"must be a list of at most {MAX_CELLS} integers")
        for index, item in enumerate(data):
            if type(item) is not int or not -(2**63) <= item < 2**63:
                raise self.error(f"{where}[{index}]", f"must be a 64-bit integer, is {item!r}")
        return column(data)

    def ragged(self, data: Any, where: str) -> Ragged:
        """A ragged column."""
        fields = self.mapping(data, where, {"lengths", "items"})
        lengths = self.ints(fields["lengths"], f"{where}.lengths")
        items = self.ints(fields["items"], f"{where}.items")
        if (lengths < 0).any() or int(lengths.sum()) != len(items):
            raise self.error(where, f"has {len(items)} items, its lengths add up to another number")
        offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return Ragged(column(offsets), items)

    def columns(self, kind: type[T], data: Any, where: str) -> T:
        """A table whose columns have one length."""
        fields = dataclasses.fields(kind)  # type: ignore[arg-type]
        values = self.mapping(data, where, {field.name for field in fields})
        out: dict[str, Any] = {}
        for field in fields:
            ragged = field.type == "Ragged"
            place = f"{where}.{field.name}"
            out[field.name] = (self.ragged if ragged else self.ints)(values[field.name], place)
        lengths = {name: len(value) for name, value in out.items()}
        if len(set(lengths.values())) > 1:
            raise self.error(where, f"has columns of different lengths: {lengths}")
        return kind(**out)

    def record(self, kind: type[T], data: Any, where: str) -> T:
        """A flat dataclass of plain values."""
        fields = {f.name: str(f.type) for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
        values = self.mapping(data, where, set(fields))
        allowed: dict[str, tuple[type, ...]] = {
            "int": (int,),
            "str": (str,),
            "float": (int, float),
            "bool": (bool,),
            "float | None": (int, float, type(None)),
        }
        for name, value in values.items():
            expected = allowed[fields[name]]
            if not isinstance(value, expected) or (
                isinstance(value, bool) and bool not in expected
            ):
                raise self.error(f"{where}.{name}", f"must be {fields[name]}, is {value!r}")
        return kind(**values)
