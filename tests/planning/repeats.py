"""Runs a script in a process of its own: under a hash seed, on one core, without some modules."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def printed(script: str, seed: str, cores: int, blocked: tuple[str, ...] = ()) -> str:
    """What it prints; ``{blocked}`` in it stands for the names of modules that it must not have."""
    paths = os.pathsep.join([str(HERE), str(HERE.parents[1] / "src")])
    done = subprocess.run(
        [sys.executable, "-c", script.format(blocked=blocked)],
        env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": paths},
        preexec_fn=(lambda: os.sched_setaffinity(0, {0})) if cores == 1 else None,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()
