"""Runs the command line in a process of its own, with the tests' plug-in experiment installed beside it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PLUGIN = Path(__file__).parents[1] / "plugin"


def environment(**more: str) -> dict[str, str]:
    """The environment in which splitfg and the plug-in are found, and a terminal of known width."""
    paths = [str(PLUGIN), *(path for path in sys.path if path)]
    clean = {k: v for k, v in os.environ.items() if not k.startswith("SPLITFG_")}
    return {**clean, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "COLUMNS": "120", **more}


def command(*arguments: str | Path) -> list[str]:
    """The command that runs ``splitfg ARGUMENTS``."""
    return [sys.executable, "-m", "splitfg_lab.cli", *map(str, arguments)]


def splitfg(*arguments: str | Path, cwd: Path | None = None, **more: str) -> subprocess.CompletedProcess[str]:
    """Run ``splitfg ARGUMENTS`` to its end."""
    return subprocess.run(
        command(*arguments), cwd=cwd, env=environment(**more), capture_output=True, text=True, timeout=300
    )
