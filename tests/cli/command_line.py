"""Runs the command line, in a process of its own with the tests' plug-in experiment installed, or in this one."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from splitfg_lab.cli import main

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


def splitfg_here(*arguments: str | Path, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Run ``splitfg ARGUMENTS`` in this process, without the plug-in; modules in ``cwd`` stay imported."""
    out, err, argv = io.StringIO(), io.StringIO(), ["splitfg", *map(str, arguments)]
    with (
        contextlib.chdir(cwd),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.multiple(sys, argv=argv, path=[*sys.path]),
        mock.patch.dict(os.environ, environment(**more), clear=True),
        pytest.raises(SystemExit) as end,
    ):
        main()
    return subprocess.CompletedProcess(argv, end.value.code or 0, out.getvalue(), err.getvalue())
