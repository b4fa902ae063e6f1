"""Fixtures of the command line's tests: calls in this process, and in others."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ultraattn.cli import main

SOURCES = Path(__file__).parents[2] / "src"


@pytest.fixture
def call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """`call(*arguments)` of `ultraattn`, in this process: exit code, standard output and error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["ultraattn", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


@pytest.fixture
def python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """`python(*arguments)`: another interpreter, which finds the library's sources."""

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        paths = [str(SOURCES), os.environ.get("PYTHONPATH", "")]
        return subprocess.run(
            [sys.executable, *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    return run
