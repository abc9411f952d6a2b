"""Runs in trouble: divergence stops them, damage and full disks lose nothing, and they go on where they began."""

from __future__ import annotations

import json
import math
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from _loops import make_folder, outcome, run_in, stopping_at
from tiny import TinyConfig
from tiny.run import TinyLearner, batch, run as run_tiny

from splitfg.errors import NonFiniteError
from splitfg.types import StepStats
from splitfg_lab.runs import (
    CheckpointError,
    RunContext,
    RunError,
    StoppedError,
    execute,
    fit,
    load_checkpoint,
    save_checkpoint,
)


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


def test_a_learning_rate_that_overflows_is_a_divergence(tmp_path: Path) -> None:
    class Large(TinyLearner):
        def step(self, x: Any, y: Any, *, generator: torch.Generator) -> StepStats:
            # as Adam does with a rate of 3e38: torch raises RuntimeError
            torch.zeros(1).addcdiv_(torch.ones(1), torch.ones(1), value=3e39)
            raise AssertionError("torch accepted the value")

    def runner(config: TinyConfig, *, seed: int, run: RunContext) -> Any:
        return fit(Large(config), batch, steps=3, generator=torch.Generator(), run=run)

    config = TinyConfig()
    report = run_in(make_folder(tmp_path, config), config, runner)
    assert report.status == "diverged"
    assert report.message.startswith("diverged at step 1: ")
    assert "smaller learning rate" in report.message


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
    with pytest.raises(RunError, match=r"torch sees no GPU|cannot resume on"):
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
    with pytest.raises(RunError, match="began on cuda and cannot resume on cpu"):
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
