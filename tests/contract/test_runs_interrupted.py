"""Evaluations and measurements that a signal interrupts: nothing is lost, and the numbers stay the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from _loops import make_folder, outcome, run_in
from tiny import TinyConfig
from tiny.run import TinyLearner, batch, evaluate

from splitfg_lab.experiments.toy_variance import ToyVariance
from splitfg_lab.experiments.toy_variance.run import run as run_toy
from splitfg_lab.runs import RunContext, RunFolder, StoppedError, draw, execute, fit, load_checkpoint
from splitfg_lab.runs.interrupts import stop_signals

PARTS = 5


def evaluating(*interrupted: tuple[int, int], number: int = signal.SIGTERM) -> Any:
    """A runner whose evaluation has parts, and that is sent a signal at given (step, part), each once."""
    left = list(interrupted)

    def runner(config: TinyConfig, *, seed: int, run: RunContext) -> Any:
        learner = TinyLearner(config)

        def in_parts(_: Any) -> dict[str, float]:
            with run.phase("validation", PARTS) as advance:
                for part in range(PARTS):
                    if (learner.taken, part) in left:
                        left.remove((learner.taken, part))
                        os.kill(os.getpid(), number)
                    advance()
            return evaluate(learner)

        generator = torch.Generator().manual_seed(seed)
        every = {"evaluate_every": 10, "log_every": config.log_every, "checkpoint_every": config.checkpoint_every}
        return fit(learner, batch, steps=config.steps, generator=generator, run=run, evaluate=in_parts, **every)

    return runner


@pytest.mark.parametrize("log_every", [1, 5, 7])
def test_an_interrupted_evaluation_is_repeated_and_changes_nothing(tmp_path: Path, log_every: int) -> None:
    config = TinyConfig(steps=20, log_every=log_every, checkpoint_every=1000)
    straight, stopped = make_folder(tmp_path / "a", config), make_folder(tmp_path / "b", config)
    run_in(straight, config, evaluating())
    runner = evaluating((10, 2), (20, 0))
    for step in (10, 20):
        with pytest.raises(StoppedError, match=f"stopped after step {step}"):
            run_in(stopped, config, runner)
    run_in(stopped, config, runner)
    assert outcome(stopped) == outcome(straight)


def test_a_signal_before_an_evaluation_does_not_wait_for_it(tmp_path: Path) -> None:
    config = TinyConfig(steps=20)
    events: list[dict[str, Any]] = []
    with pytest.raises(StoppedError):
        run_in(make_folder(tmp_path, config), config, evaluating((10, 1)), events)
    done = [event["done"] for event in events if event["event"] == "phase"]
    assert done[0] == 0
    assert done[-1] == PARTS, "the bar is closed"
    assert all(part <= 2 for part in done[:-1])


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="needs SIGHUP")
def test_a_closing_terminal_saves_like_a_termination(tmp_path: Path) -> None:
    config = TinyConfig(steps=20)
    folder = make_folder(tmp_path, config)
    with pytest.raises(StoppedError):
        run_in(folder, config, evaluating((10, 1), number=signal.SIGHUP))
    assert folder.has_checkpoint


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="needs SIGHUP")
def test_under_nohup_a_closing_terminal_is_ignored() -> None:
    assert signal.SIGHUP in stop_signals()
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert signal.SIGHUP not in stop_signals()
    finally:
        signal.signal(signal.SIGHUP, before)


def toy_folder(path: Path, config: ToyVariance) -> RunFolder:
    folder = RunFolder.of(path, "toy_variance", "ce-c50", 0)
    folder.prepare("toy_variance", "ce-c50", 0, config)
    return folder


def test_the_toy_experiment_resumes_with_the_same_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ToyVariance(classes=3, draws=8, batch=4)
    straight, stopped = toy_folder(tmp_path / "a", config), toy_folder(tmp_path / "b", config)
    expected = execute(straight, run_toy, config, device="cpu", emit=lambda event: None)
    interrupted = [5, 11]

    def interrupt(self: RunContext, step: int, steps: int, *, loss: float | None = None) -> None:
        assert steps == 2 * config.draws
        if step in interrupted:
            interrupted.remove(step)
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(RunContext, "progress", interrupt)
    for step in (5, 11):
        with pytest.raises(StoppedError, match=f"stopped after step {step}"):
            execute(stopped, run_toy, config, device="cpu", emit=lambda event: None)
    report = execute(stopped, run_toy, config, device="cpu", emit=lambda event: None)
    assert report.metrics == expected.metrics
    assert (report.steps, report.jvps_per_step, report.trunk_backward) == (16, 1.0, 0.0)


def test_draws_are_saved_on_the_way(tmp_path: Path) -> None:
    def runner(config: TinyConfig, *, seed: int, run: RunContext) -> Any:
        generator = torch.Generator().manual_seed(seed)

        def measure(k: int) -> torch.Tensor:
            if k == 7:
                raise RuntimeError("dies here")
            return torch.randn((), generator=generator)

        return {"mean": draw(measure, count=10, generator=generator, run=run, jvps=2, save_every=3).mean()}

    config = TinyConfig()
    folder = make_folder(tmp_path, config)
    with pytest.raises(RuntimeError, match="dies here"):
        run_in(folder, config, runner)
    checkpoint = load_checkpoint(folder.path)
    assert checkpoint is not None
    assert checkpoint.state["state"]["step"] == 6
    assert len(checkpoint.state["state"]["values"]) == 6


def test_another_thread_gets_no_signals() -> None:
    code = """
import threading
from splitfg_lab.runs.interrupts import stop_requests
def use():
    with stop_requests() as request:
        assert not request.made
thread = threading.Thread(target=use); thread.start(); thread.join(); print("fine")
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("fine\n", "")
