"""A saved plan comes back equal, byte for byte; a damaged file is refused with its place."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ultraattn as ua
from tests.plans.samples import SAMPLES, small
from ultraattn.plans import Plan, storage
from ultraattn.plans.storage import canonical, dumps, loads, sha256

Data = dict[str, Any]


@pytest.mark.parametrize("name", list(SAMPLES))
def test_what_is_saved_comes_back_equal(name: str, tmp_path: Path) -> None:
    plan = SAMPLES[name]()
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == plan
    assert again.digest == plan.digest
    again.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "plan.json").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.json", "plan.json"]


def test_plans_compare_by_value() -> None:
    assert small() == small()
    assert small() != small(scale=0.125)
    assert small() != small(layout="zigzag")
    assert small().digest != small(scale=0.125).digest


def test_the_file_is_canonical() -> None:
    text = dumps(small())
    assert text == canonical(json.loads(text)) + "\n"


PLANNING = """
import hashlib, sys
import ultraattn as ua
from ultraattn.plans.storage import dumps
mask = ua.masks.strided() | ua.masks.sliding_window(50)
plan = ua.plan(mask, seqlen=500, heads=4, kv_heads=2, head_dim=8, ranks=4, effort="fast")
assert "torch" not in sys.modules, "planning imported torch"
print(hashlib.sha256(dumps(plan).encode()).hexdigest())
"""


def test_the_same_bytes_under_any_hash_seed_and_without_torch() -> None:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    found = {
        subprocess.run(
            [sys.executable, "-c", PLANNING],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("0", "1", "2")
    }
    assert len(found) == 1
    assert len(found.pop().strip()) == 64


def test_a_mask_that_cannot_be_saved_is_known_by_its_grid() -> None:
    even = ua.masks.from_mask_mod(lambda b, h, q, kv: (q + kv) % 2 == 0)
    plan = small(even)
    again = loads(dumps(plan))
    assert again == plan
    assert again.problem.mask == ""
    odd = small(ua.masks.from_mask_mod(lambda b, h, q, kv: (q - kv) % 3 == 0))
    assert odd.problem.mask_digest != plan.problem.mask_digest


def sealed(data: Data) -> str:
    """The text of a file with these sections and digests that fit them."""
    names = data.keys() - {"format", "version", "digests", "digest"}
    digests = {name: sha256(data[name]) for name in names}
    return canonical({**data, "digests": digests, "digest": sha256(digests)})


def edited(change: Callable[[Data], object]) -> Data:
    data: Data = copy.deepcopy(json.loads(dumps(small())))
    change(data)
    return data


def put(value: object, *keys: str | int) -> Callable[[Data], None]:
    def change(data: Any) -> None:
        for key in keys[:-1]:
            data = data[key]
        data[keys[-1]] = value

    return change


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("problem", "scale"), 2.0),
        (("place", "nodes"), 2),
        (("layouts", "q", "owners", 0), 2),
        (("forward", "program", "tasks", "rank", 0), 2),
        (("backward", "notes"), ["proved"]),
        (("versions", "planner"), "0"),
    ],
)
def test_an_edited_file_is_refused_with_its_section(
    keys: tuple[str | int, ...], value: object
) -> None:
    text = canonical(edited(put(value, *keys)))
    assert text + "\n" != dumps(small())
    with pytest.raises(ua.PlanError, match=f"^plan.json: {keys[0]} does not match its digest"):
        loads(text, "plan.json")


def test_an_edited_digest_is_refused() -> None:
    text = canonical(edited(put("0" * 64, "digest")))
    with pytest.raises(ua.PlanError, match="digest does not match the sections' digests"):
        loads(text)


@pytest.mark.parametrize("part", [0.0, 0.1, 0.5, 0.99])
def test_a_truncated_file_is_refused_with_line_and_column(part: float, tmp_path: Path) -> None:
    text = dumps(small()).rstrip()
    path = tmp_path / "cut.json"
    path.write_text(text[: int(len(text) * part)])
    with pytest.raises(ua.PlanError, match=r"cut.json: not whole JSON at line 1, column \d+"):
        Plan.load(path)


@pytest.mark.parametrize(("version", "words"), [(2, "upgrade ultraattn"), (0, "plan again"),
                                                 ("1", "plan again"), (None, "plan again"),
                                                 (True, "plan again")])  # fmt: skip
def test_another_version_is_refused(version: object, words: str) -> None:
    with pytest.raises(ua.PlanError, match=f"version is {version!r}, .*{words}"):
        loads(canonical(edited(put(version, "version"))))


def test_a_newer_file_with_new_keys_is_refused_for_its_version() -> None:
    data = edited(put(2, "version")) | {"medium": {}}
    with pytest.raises(ua.PlanError, match="upgrade ultraattn"):
        loads(sealed(data))


@pytest.mark.parametrize("text", ["[]", "3", "null", '"plan"', "{}", '{"format":"other"}'])
def test_other_json_is_refused(text: str) -> None:
    with pytest.raises(ua.PlanError, match=r"the file must be an object|format is"):
        loads(text)


UNSOUND = {
    "an unknown key": (("problem", "colour"), 1, r"problem has unknown keys \['colour'\]"),
    "an unknown section": (("colour",), 1, r"the file has unknown keys \['colour'\]"),
    "text for a number": (("problem", "heads"), "2", r"problem.heads must be int, is '2'"),
    "a boolean for a number": (("problem", "heads"), True, r"problem.heads must be int, is True"),
    "a number for a boolean": (("problem", "sink"), 0, r"problem.sink must be bool, is 0"),
    "a fraction in a column": (
        ("forward", "program", "tasks", "rank", 1),
        0.5,
        r"forward.program.tasks.rank\[1\] must be a 64-bit integer, is 0.5",
    ),
    "a huge number in a column": (
        ("forward", "program", "tasks", "rank", 1),
        2**63,
        r"forward.program.tasks.rank\[1\] must be a 64-bit integer",
    ),
    "a column of another length": (
        ("forward", "program", "tasks", "rank"),
        [0],
        r"forward.program.tasks has columns of different lengths",
    ),
    "rows that do not add up": (
        ("forward", "program", "tasks", "reads", "items"),
        [0],
        r"forward.program.tasks.reads has 1 items, its lengths add up to another number",
    ),
    "a column that is no list": (
        ("forward", "program", "values", "rank"),
        "012",
        r"forward.program.values.rank must be a list",
    ),
    "a chunk of two numbers": (
        ("layouts", "q", "chunks", 1),
        [8, 16],
        r"layouts.q.chunks\[1\] must be \[start, stop, step\]",
    ),
    "a chunk that runs backwards": (("layouts", "q", "chunks", 1), [16, 8, 1], r"chunk \(16, 8"),
    "chunks that leave a gap": (("layouts", "q", "chunks", 1), [9, 16, 1], r"gap at token 8"),
    "an owner that is no rank": (("layouts", "q", "owners", 1), 7, r"owner 7 among 3 ranks"),
    "a layout whose length is no number": (("layouts", "kv", "length"), None, r"layouts.kv"),
    "a layout whose name is no text": (("layouts", "kv", "name"), 5, r"layouts.kv"),
    "a place of fewer ranks": (("place", "gpus_per_node"), 2, r"owner 2 among 2 ranks"),
    "a place without ranks": (("place", "gpus_per_node"), 0, r"place"),
    "an unknown dtype": (("problem", "dtype"), "int8", r"dtype 'int8'"),
    "a feature of the future": (("problem", "softcap"), 30.0, r"softcap"),
    "a strategy that is no text": (("forward", "strategy"), 5, r"forward.strategy"),
    "head groups that are no number": (("forward", "head_groups"), "x", r"forward.head_groups"),
    "notes that are no list": (("forward", "notes"), "raised", r"forward.notes"),
    "a note that is no text": (("forward", "notes"), [1], r"forward.notes"),
    "a bound that is no number": (("forward", "bounds", "lower_bound"), "0", r"lower_bound"),
    "versions that are no text": (("versions", "planner"), 1, r"versions must map"),
    "an unsound program": (("forward", "program", "tasks", "rank", 0), 2, r"forward pass, "),
}


@pytest.mark.parametrize("name", list(UNSOUND))
def test_a_file_with_fitting_digests_is_refused_with_its_place(name: str) -> None:
    keys, value, words = UNSOUND[name]
    with pytest.raises(ua.PlanError, match=f"^plan.json: .*{words}"):
        loads(sealed(edited(put(value, *keys))), "plan.json")


def test_a_key_that_is_missing_is_named() -> None:
    data = edited(lambda data: data["forward"].pop("bounds"))
    with pytest.raises(ua.PlanError, match=r"forward has unknown keys \[\], lacks keys \['bounds'"):
        loads(sealed(data))


def test_a_key_that_is_there_twice_is_refused() -> None:
    text = dumps(small()).replace('"heads":2', '"heads":2,"heads":2', 1)
    with pytest.raises(ua.PlanError, match="'heads' twice"):
        loads(text)


def test_a_number_that_json_does_not_have_is_refused() -> None:
    text = dumps(small()).replace('"scale":0.5', '"scale":NaN')
    assert "NaN" in text
    with pytest.raises(ua.PlanError, match="NaN"):
        loads(text)


def test_a_file_past_the_limit_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    small().save(path)
    monkeypatch.setattr(storage, "MAX_FILE_BYTES", 1000)
    with pytest.raises(ua.PlanError, match="at most 1000"):
        Plan.load(path)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(b"\xff\xfe\x00plan")
    with pytest.raises(ua.PlanError, match=r"plan.json: not text"):
        Plan.load(path)


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(ua.PlanError, match="nest"):
        loads("[" * 100_000)


def test_an_unsound_plan_is_not_saved(tmp_path: Path) -> None:
    plan = small()
    broken = dataclasses.replace(plan, forward=plan.backward)
    with pytest.raises(ua.PlanError):
        broken.save(tmp_path / "plan.json")
    assert list(tmp_path.iterdir()) == []
