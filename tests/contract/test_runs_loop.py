"""The training loop: interrupted runs end as uninterrupted ones do, divergence stops them, and the books are right."""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "plugin"))
from tiny import TinyConfig
from tiny.run import TinyLearner, batch, evaluate, train
from tiny.run import run as run_tiny

from splitfg.errors import NonFiniteError
from splitfg.runs import (
    CheckpointError,
    RunContext,
    RunError,
    RunFolder,
    RunReport,
    StoppedError,
    execute,
    fit,
    load_checkpoint,
    read_metrics,
    save_checkpoint,
)
from splitfg.types import StepStats


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
    assert report.versions["torch"] == torch.__version__


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


def test_an_infinite_loss_stops_the_run_and_keeps_the_checkpoint_before(tmp_path: Path) -> None:
    config = TinyConfig(diverge_at=15, log_every=50, checkpoint_every=6)
    folder = make_folder(tmp_path, config)
    report = run_in(folder, config)
    assert report.status == "diverged"
    assert report.message == "diverged at step 15: loss is inf"
    assert list(report.metrics) == ["error"]
    assert all(math.isfinite(value) for value in report.metrics.values())
    checkpoint = load_checkpoint(folder.path)
    assert checkpoint is not None
    assert checkpoint.state["state"]["step"] == 12
    assert folder.status() == "diverged"
    assert run_in(folder, config) == report


class Breaks(TinyLearner):
    """Goes wrong in a way of its own after a few steps."""

    def __init__(self, config: TinyConfig, how: str) -> None:
        super().__init__(config)
        self.how = how
        self.mask = torch.tensor([0.0, -math.inf])

    def step(self, x: Any, y: Any, *, generator: torch.Generator) -> StepStats:
        stats = super().step(x, y, generator=generator)
        if self.taken == 8 and self.how == "parameter":
            self.weight.data[2] = math.nan
        if self.taken == 8 and self.how == "raises":
            raise NonFiniteError(["h is not finite"])
        if self.taken == 8 and self.how == "metric":
            return StepStats(stats.loss, {"norm": torch.tensor(math.inf)})
        return stats

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"mask": self.mask}


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("parameter", "no longer finite: weight"),
        ("raises", "h is not finite"),
        ("metric", "norm is inf"),
        ("evaluation", "error is nan"),
        ("result", "score is inf"),
    ],
)
def test_whatever_stops_being_finite_is_named(tmp_path: Path, how: str, reason: str) -> None:
    config = TinyConfig(steps=8, checkpoint_every=4, evaluate_every=4)

    def runner(config: TinyConfig, *, seed: int, run: RunContext) -> Any:
        learner = Breaks(config, how)
        metrics = fit(
            learner,
            batch,
            steps=8,
            generator=torch.Generator().manual_seed(seed),
            run=run,
            evaluate=lambda _: {"error": math.nan if how == "evaluation" and learner.taken == 8 else 1.0},
            evaluate_every=4,
            checkpoint_every=4,
        )
        return metrics | ({"score": math.inf} if how == "result" else {})

    folder = make_folder(tmp_path, config)
    report = run_in(folder, config, runner)
    assert report.status == "diverged"
    assert reason in report.message
    assert "step 8" in report.message
    assert report.metrics == {"error": 1.0}
    checkpoint = load_checkpoint(folder.path)
    assert checkpoint is not None
    assert checkpoint.state["state"]["step"] == (8 if how == "result" else 4)


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
    with pytest.raises(RunError, match="one fit"):
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


def test_a_finished_run_is_not_run_again(tmp_path: Path) -> None:
    config = TinyConfig(steps=3)
    folder = make_folder(tmp_path, config)
    report = run_in(folder, config)
    before = {path.name: path.read_bytes() for path in folder.path.iterdir()}
    assert run_in(folder, config, stopping_at(0)) == report
    assert {path.name: path.read_bytes() for path in folder.path.iterdir()} == before


def test_a_damaged_checkpoint_is_noted_and_the_run_still_ends_the_same(tmp_path: Path) -> None:
    config = TinyConfig(checkpoint_every=3)
    straight, damaged = make_folder(tmp_path / "a", config), make_folder(tmp_path / "b", config)
    run_in(straight, config)
    with pytest.raises(StoppedError):
        run_in(damaged, config, stopping_at(10))
    side = json.loads((damaged.path / "checkpoint.json").read_text())
    os.truncate(damaged.path / side["tensors"], 100)
    events: list[dict[str, Any]] = []
    run_in(damaged, config, events=events)
    notes = [event["text"] for event in events if event["event"] == "note"]
    assert len(notes) == 1
    assert "previous checkpoint" in notes[0]
    assert [event["step"] for event in events if event["event"] == "started"] == [9]
    assert outcome(damaged) == outcome(straight)


def test_a_run_goes_on_where_it_began(tmp_path: Path) -> None:
    config = TinyConfig()
    folder = make_folder(tmp_path, config)
    with pytest.raises(StoppedError):
        run_in(folder, config, stopping_at(10))
    with pytest.raises(RunError, match=r"torch sees no GPU|can only go on there"):
        execute(folder, run_tiny, config, device="cuda", emit=lambda event: None)
    with pytest.raises(RunError, match="not a device"):
        execute(folder, run_tiny, config, device="abacus", emit=lambda event: None)
    assert execute(folder, run_tiny, config, device="auto", emit=lambda event: None).status == "done"


def test_a_run_that_began_on_a_gpu_does_not_go_on_on_a_cpu(tmp_path: Path) -> None:
    config = TinyConfig()
    folder = make_folder(tmp_path, config)
    with pytest.raises(StoppedError):
        run_in(folder, config, stopping_at(10))
    checkpoint = load_checkpoint(folder.path)
    assert checkpoint is not None
    save_checkpoint(folder.path, checkpoint.state | {"device": "cuda"})
    with pytest.raises(RunError, match="began on cuda and can only go on there, not on cpu"):
        run_in(folder, config)


@contextmanager
def files_no_larger_than(size: int) -> Iterator[None]:
    """The kernel refuses to write beyond this size, as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_stops_the_run_and_loses_nothing(tmp_path: Path) -> None:
    config = TinyConfig(checkpoint_every=3)
    straight, full = make_folder(tmp_path / "a", config), make_folder(tmp_path / "b", config)
    run_in(straight, config)
    with pytest.raises(StoppedError):
        run_in(full, config, stopping_at(10))
    with files_no_larger_than(1000), pytest.raises(CheckpointError, match="cannot write a checkpoint"):
        run_in(full, config)
    assert list(full.path.glob(".*.tmp")) == []
    run_in(full, config)
    assert outcome(full) == outcome(straight)


def test_a_full_disk_in_the_middle_of_a_log_line_loses_nothing(tmp_path: Path) -> None:
    config = TinyConfig(log_every=1, checkpoint_every=1000)
    straight, full = make_folder(tmp_path / "a", config), make_folder(tmp_path / "b", config)
    run_in(straight, config)
    with files_no_larger_than(1000), pytest.raises(RunError, match=r"cannot write .*metrics\.jsonl"):
        run_in(full, config)
    run_in(full, config)
    assert outcome(full) == outcome(straight)
