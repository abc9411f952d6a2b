"""Runs of the small experiment in ``plugin``, made in this process."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "plugin"))
from tiny import TinyConfig
from tiny.run import batch, run as run_tiny, train

from splitfg_lab.runs import RunContext, RunFolder, RunReport, execute, load_checkpoint, read_metrics


def make_folder(path: Path, config: TinyConfig, seed: int = 0) -> RunFolder:
    folder = RunFolder.of(path, "tiny", "adam", seed)
    folder.prepare("tiny", "adam", seed, config)
    return folder


def run_in(folder: RunFolder, config: TinyConfig, runner: Any = run_tiny, events: list[Any] | None = None) -> RunReport:
    emit = (lambda event: None) if events is None else events.append
    return execute(folder, runner, config, device="cpu", emit=emit)


def outcome(folder: RunFolder) -> dict[str, Any]:
    """Everything a run leaves behind that must not depend on how often it was interrupted, or on the clock."""
    checkpoint = load_checkpoint(folder.path)
    assert checkpoint is not None
    state = checkpoint.state["state"]
    lines = [{k: v for k, v in line.items() if k != "wall_s"} for line in read_metrics(folder.metrics_path)]
    return {
        "step": state["step"],
        "weight": state["learner"]["weight"].tolist(),
        "moments": [m.tolist() for m in state["learner"]["optimizer"]["state"][0].values()],
        "generator": state["generator"].tolist(),
        "lines": lines,
        "metrics": folder.report().metrics,
        "steps": folder.report().steps,
        "jvps": folder.report().jvps_per_step,
    }


def stopping_at(*steps: int) -> Any:
    """A runner that is sent a signal in the middle of the given steps, each once per session."""
    left = list(steps)

    def runner(config: TinyConfig, *, seed: int, run: RunContext) -> Any:
        def batches(step: int) -> Any:
            if step in left:
                left.remove(step)
                os.kill(os.getpid(), signal.SIGTERM if step % 2 else signal.SIGINT)
            return batch(step)

        return train(config, seed=seed, run=run, batches=batches)

    return runner
