"""The README does what it says: its Python runs, and so do the commands it shows."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROJECT_COMMANDS = {"make run", "make test"}
"""What these do is what the tests themselves are part of."""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


def commands() -> list[str]:
    lines = [line for block in blocks("console") for line in block.splitlines()]
    return [line[2:] for line in lines if line.startswith("$ ")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the commands run, one after another."""
    made = tmp_path_factory.mktemp("readme")
    (made / "examples").symlink_to(ROOT / "examples")
    return made


def run(arguments: list[str], folder: Path) -> None:
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(
        arguments, cwd=folder, env=environment, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{shlex.join(arguments)}\n{done.stdout}\n{done.stderr}"


def test_the_python_of_planning_runs(folder: Path):
    planning = [block for block in blocks("python") if "init_process_group" not in block]
    assert planning
    for block in planning:
        run([sys.executable, "-c", block], folder)


def test_the_python_of_running_is_the_example_that_torchrun_starts():
    [block] = [block for block in blocks("python") if "init_process_group" in block]
    assert block in (ROOT / "examples" / "attention.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("command", commands())
def test_commands_run(command: str, folder: Path):
    if command in PROJECT_COMMANDS:
        target = command.split()[1]
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
        return
    program, *arguments = shlex.split(command)
    modules = {"ultraattn": "ultraattn.cli", "torchrun": "torch.distributed.run"}
    run([sys.executable, "-m", modules[program], *arguments], folder)


def test_links_lead_somewhere():
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    assert targets
    missing = [t for t in targets if "://" not in t and not (ROOT / t).exists()]
    assert missing == []
