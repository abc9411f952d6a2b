"""The Makefile's targets that take something away."""

import shutil
import subprocess
from pathlib import Path

import pytest


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_clean_leaves_runs_alone():
    command = ["make", "--dry-run", "--no-print-directory", "clean"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == {"rm", "-rf", ".venv", "build", "dist"}
