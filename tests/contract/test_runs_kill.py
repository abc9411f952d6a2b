"""A run that is killed ten times at random moments ends with the very numbers of one that was left alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "plugin"))
from _loops import make_folder, outcome
from tiny import TinyConfig

KILLS = 10


def test_ten_kills_change_nothing(tmp_path: Path) -> None:
    config = TinyConfig(steps=250, pause_s=0.004, checkpoint_every=3, log_every=7, evaluate_every=10)
    straight, killed = make_folder(tmp_path / "a", config), make_folder(tmp_path / "b", config)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tiny.kill", str(straight.path), str(killed.path), str(KILLS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    steps = json.loads(done.stdout.splitlines()[-1])
    assert len(steps) == KILLS
    assert steps == sorted(steps)
    assert len(set(steps)) >= KILLS - 1, "every session but the first has saved"
    assert outcome(killed) == outcome(straight)
