"""The training loop: interrupted runs end as uninterrupted ones do, and the books are right."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from _loops import make_folder, outcome, run_in, stopping_at
from tiny import TinyConfig
from tiny.run import TinyLearner, batch, evaluate, run as run_tiny

from splitfg.types import StepStats
from splitfg_lab.runs import (
    RunContext,
    RunError,
    StoppedError,
    fit,
    load_checkpoint,
    read_metrics,
)


def test_equal_runs_give_equal_results(tmp_path: Path) -> None:
    config = TinyConfig()
    folders = [make_folder(tmp_path / name, config) for name in ("a", "b")]
    for folder in folders:
        run_in(folder, config)
    assert outcome(folders[0]) == outcome(folders[1])
    other = make_folder(tmp_path, config, seed=1)
    run_in(other, config)
    assert outcome(other)["weight"] != outcome(folders[0])["weight"]


@pytest.mark.parametrize("checkpoint_every", [1, 3, 1000])
def test_signals_save_and_the_run_goes_on_as_if_nothing_had_happened(tmp_path: Path, checkpoint_every: int) -> None:
    config = TinyConfig(checkpoint_every=checkpoint_every)
    straight, stopped = make_folder(tmp_path / "a", config), make_folder(tmp_path / "b", config)
    run_in(straight, config)
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    runner = stopping_at(4, 13, 20, 33)
    for step in (4, 13, 20, 33):
        with pytest.raises(StoppedError, match=f"stopped after step {step + 1}"):
            run_in(stopped, config, runner)
        assert not stopped.finished
    run_in(stopped, config, runner)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    assert outcome(stopped) == outcome(straight)


def test_a_run_goes_on_with_as_many_threads_as_it_began_with(tmp_path: Path, threads: Callable[[int], None]) -> None:
    used = []

    def runner(config: TinyConfig, *, seed: int, run: RunContext) -> Any:
        used.append(torch.get_num_threads())
        return stopping(config, seed=seed, run=run)

    config, stopping = TinyConfig(), stopping_at(4)
    folder = make_folder(tmp_path, config)
    threads(3)
    with pytest.raises(StoppedError):
        run_in(folder, config, runner)
    threads(2)
    assert run_in(folder, config, runner).threads == 3
    assert used == [3, 3]
    assert torch.get_num_threads() == 2


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of CPU threads, for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_a_signal_while_evaluating_is_answered_after_the_next_step(tmp_path: Path) -> None:
    def interrupting(learner: Any) -> dict[str, float]:
        if learner.taken == 10:
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(learner)

    def runner(config: TinyConfig, *, seed: int, run: RunContext) -> Any:
        generator = torch.Generator().manual_seed(seed)
        learner = TinyLearner(config)
        return fit(learner, batch, steps=40, generator=generator, run=run, evaluate=interrupting, evaluate_every=10)

    config = TinyConfig()
    folder = make_folder(tmp_path, config)
    with pytest.raises(StoppedError, match="stopped after step 11"):
        run_in(folder, config, runner)
    checkpoint = load_checkpoint(folder.path)
    assert checkpoint is not None
    assert checkpoint.state["state"]["step"] == 11


def test_a_signal_in_the_last_step_lets_the_run_finish(tmp_path: Path) -> None:
    config = TinyConfig(steps=5)
    folder = make_folder(tmp_path, config)
    assert run_in(folder, config, stopping_at(4)).status == "done"


def test_a_run_killed_before_its_report_finishes_from_its_checkpoint(tmp_path: Path) -> None:
    config = TinyConfig()
    folder = make_folder(tmp_path, config)
    first = run_in(folder, config)
    for name in ("DONE", "report.json"):
        (folder.path / name).unlink()
    checkpoint = load_checkpoint(folder.path)
    assert checkpoint is not None
    second = run_in(folder, config)
    assert (second.metrics, second.steps, second.started) == (first.metrics, first.steps, first.started)
    assert second.wall_s >= round(checkpoint.state["books"]["wall_s"], 3) > 0


def test_log_lines_are_means_over_the_steps_since_the_last(tmp_path: Path) -> None:
    config = TinyConfig(steps=17, log_every=7, evaluate_every=10)
    folder = make_folder(tmp_path, config)
    report = run_in(folder, config)
    torch.manual_seed(0)
    learner, generator = TinyLearner(config), torch.Generator().manual_seed(0)
    losses, norms, errors = [], [], {}
    for step in range(17):
        stats = learner.step(*batch(step), generator=generator)
        losses.append(stats.loss.item())
        norms.append(float(stats.metrics["norm"]))
        if step + 1 in (10, 17):
            errors[step + 1] = evaluate(learner)["error"]

    def mean(values: list[float]) -> float:
        return pytest.approx(sum(values) / len(values), rel=1e-12)

    lines = [{k: v for k, v in line.items() if k != "wall_s"} for line in read_metrics(folder.metrics_path)]
    assert lines == [
        {"step": 7, "loss": mean(losses[:7]), "norm": mean(norms[:7])},
        {"step": 10, "error": errors[10]},
        {"step": 14, "loss": mean(losses[7:14]), "norm": mean(norms[7:14])},
        {"step": 17, "loss": mean(losses[14:]), "norm": mean(norms[14:]), "error": errors[17]},
    ]
    assert report.metrics == {"error": errors[17]}
    assert (report.steps, report.jvps_per_step, report.trunk_backward) == (17, 4.0, 0.0)
    assert report.step_ms is not None
    assert 0 < report.step_ms < 1e3 * report.wall_s
    assert report.peak_memory_mib > 10
    assert report.versions["torch"] == version("torch")


def test_events_tell_the_whole_story(tmp_path: Path) -> None:
    config = TinyConfig(steps=5)
    events: list[dict[str, Any]] = []
    run_in(make_folder(tmp_path, config), config, events=events)
    assert {event["run"] for event in events} == {"tiny/adam/seed0"}
    kinds = [event["event"] for event in events]
    assert kinds[0] == "started"
    assert kinds[-1] == "finished"
    assert {"progress", "metrics"} <= set(kinds)
    assert json.loads(json.dumps(events)) == events
    last = [event for event in events if event["event"] == "progress"][-1]
    assert (last["step"], last["steps"]) == (5, 5)


def test_a_step_can_only_report_single_numbers(tmp_path: Path) -> None:
    class Verbose(TinyLearner):
        def step(self, x: Any, y: Any, *, generator: torch.Generator) -> StepStats:
            return StepStats(torch.tensor(0.0), {"scores": torch.zeros(3)})

    def runner(config: TinyConfig, *, seed: int, run: RunContext) -> Any:
        return fit(Verbose(config), batch, steps=2, generator=torch.Generator(), run=run)

    config = TinyConfig()
    with pytest.raises(ValueError, match=r"scores of shape \(3,\)"):
        run_in(make_folder(tmp_path, config), config, runner)


def test_reused_memory_does_not_blur_the_log(tmp_path: Path) -> None:
    """A captured step hands out the same tensor every time, with the newest value in it."""

    class Captured(TinyLearner):
        out = torch.zeros(())

        def step(self, x: Any, y: Any, *, generator: torch.Generator) -> StepStats:
            self.out += 1
            return StepStats(self.out)

    def runner(config: TinyConfig, *, seed: int, run: RunContext) -> Any:
        every = {"log_every": 4, "checkpoint_every": 4}
        return fit(Captured(config), batch, steps=4, generator=torch.Generator(), run=run, **every)

    config = TinyConfig()
    folder = make_folder(tmp_path, config)
    report = run_in(folder, config, runner)
    assert [line["loss"] for line in read_metrics(folder.metrics_path)] == [2.5]
    assert (report.jvps_per_step, report.trunk_backward) == (None, None)


def test_a_run_has_one_fit(tmp_path: Path) -> None:
    def runner(config: TinyConfig, *, seed: int, run: RunContext) -> Any:
        run_tiny(config, seed=seed, run=run)
        return run_tiny(config, seed=seed, run=run)

    config = TinyConfig(steps=2)
    with pytest.raises(RunError, match="call fit or draw once"):
        run_in(make_folder(tmp_path, config), config, runner)


@pytest.mark.parametrize("field", ["steps", "log_every", "evaluate_every", "checkpoint_every"])
def test_nonsense_rhythms_are_refused(tmp_path: Path, field: str) -> None:
    def runner(config: TinyConfig, *, seed: int, run: RunContext) -> Any:
        options: dict[str, Any] = {"steps": 5, field: 0}
        return fit(TinyLearner(config), batch, generator=torch.Generator(), run=run, **options)

    config = TinyConfig()
    with pytest.raises(ValueError, match="must be positive"):
        run_in(make_folder(tmp_path, config), config, runner)


def test_a_runner_that_only_measures_needs_no_fit(tmp_path: Path) -> None:
    def runner(config: TinyConfig, *, seed: int, run: RunContext) -> Any:
        run.log(1, {"variance": 2.0})
        run.count(steps=10, jvps=30, trunk_backward=5, seconds=0.5)
        return {"variance": 2}

    config = TinyConfig()
    folder = make_folder(tmp_path, config)
    report = run_in(folder, config, runner)
    assert report.metrics == {"variance": 2.0}
    assert (report.steps, report.jvps_per_step, report.trunk_backward, report.step_ms) == (10, 3.0, 0.5, 50.0)
    assert [line["variance"] for line in read_metrics(folder.metrics_path)] == [2.0]


def test_the_first_steps_are_not_part_of_the_step_time(tmp_path: Path) -> None:
    def runner(config: TinyConfig, *, seed: int, run: RunContext) -> Any:
        run.count(steps=1, seconds=10.0)
        run.count(steps=4, seconds=0.2)
        return {}

    config = TinyConfig()
    report = run_in(make_folder(tmp_path, config), config, runner)
    assert (report.steps, report.step_ms) == (5, 50.0)
