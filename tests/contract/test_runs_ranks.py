"""Runs that several processes share: one writes the folder, and any number of processes resumes it."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch

import splitfg
from splitfg.distributed import Ranks
from splitfg.testing import example_split
from splitfg_lab.commands._making import How
from splitfg_lab.runs import RunFolder, StoppedError, execute, fit, read_metrics

STEPS = 12


@dataclass(frozen=True)
class Config:
    divided: bool = True


def runner(config, *, seed, run, stop_at=None):
    split, x, y = example_split()
    estimator = splitfg.SplitFG(K=3)
    estimator = run.spread(estimator) if config.divided else estimator
    learner = splitfg.GradientLearner(split, estimator, torch.optim.Adam(split.model.parameters(), lr=1e-2))
    generator = torch.Generator().manual_seed(seed)

    def batch(step):
        if step == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        rows = (torch.arange(10) + step) % len(x)
        return x[rows], y[rows]

    def evaluate(learner):
        weights = torch.cat([p.detach().flatten() for p in split.model.parameters()])
        return {"sum": weights.sum().item(), "norm": weights.norm().item()}

    return fit(
        learner, batch, steps=STEPS, generator=generator, run=run, evaluate=evaluate, evaluate_every=4, log_every=2
    )


def prepared(path):
    folder = RunFolder.of(Path(path), "shared", "preset", 0)
    folder.prepare("shared", "preset", 0, Config())
    return folder


def in_ranks(rank, path, divided=True):
    folder, events = RunFolder.of(Path(path), "shared", "preset", 0), []
    report = execute(folder, runner, Config(divided), device="cpu", emit=events.append, ranks=Ranks())
    return report.metrics, [event["event"] for event in events]


def alone(path, stop_at=None):
    folder = prepared(path)
    return execute(folder, partial(runner, stop_at=stop_at), Config(), device="cpu", emit=lambda event: None)


def values(path):
    """The logged numbers, without times."""
    lines = read_metrics(RunFolder.of(Path(path), "shared", "preset", 0).metrics_path)
    return [{name: v for name, v in line.items() if name != "wall_s"} for line in lines]


def test_one_process_writes_the_folder_and_the_numbers_are_those_of_one(crew, tmp_path):
    expected = alone(tmp_path / "one")
    folder = prepared(tmp_path / "four")
    found = crew(in_ranks, str(tmp_path / "four"))
    for metrics, _ in found:
        assert metrics == pytest.approx(expected.metrics, rel=1e-12)
    assert [bool(events) for _, events in found] == [True, False, False, False]
    assert folder.report().ranks == 4
    assert expected.ranks == 1
    assert [line["step"] for line in values(tmp_path / "four")] == [line["step"] for line in values(tmp_path / "one")]
    for one, other in zip(values(tmp_path / "one"), values(tmp_path / "four"), strict=True):
        assert other == pytest.approx(one, rel=1e-9)


def test_a_run_resumes_with_another_number_of_processes(crew, tmp_path):
    expected = alone(tmp_path / "one")
    with pytest.raises(StoppedError):
        alone(tmp_path / "stopped", stop_at=5)
    folder = RunFolder.of(tmp_path / "stopped", "shared", "preset", 0)
    assert json.loads((folder.path / "checkpoint.json").read_text())["state"]
    for metrics, _ in crew(in_ranks, str(tmp_path / "stopped")):
        assert metrics == pytest.approx(expected.metrics, rel=1e-12)
    assert folder.report().steps == STEPS
    assert len(values(tmp_path / "stopped")) == len(values(tmp_path / "one"))


def test_a_runner_that_does_not_divide_its_work_is_an_error_in_all(crew, tmp_path):
    folder = prepared(tmp_path)
    found = crew.errors(in_ranks, str(tmp_path), False)
    assert {kind for kind, _ in found} == {"RunError"}
    assert all("--ranks" in message for _, message in found)
    assert not folder.finished
    with folder.locked():  # raises if the failed processes still hold the lock
        pass


def test_ranks_are_started_and_restarted_by_torchrun(tmp_path):
    folder = RunFolder.of(tmp_path, "shared", "preset", 0)
    _, *plain = How(device="cpu").command(folder)
    assert plain == ["-m", "splitfg_lab.commands.worker", str(folder.path), "--device", "cpu"]
    command = " ".join(How(device="cpu", ranks=4, restarts=2, timeout=30.0).command(folder)[1:])
    worker = f"-m splitfg_lab.commands.worker {folder.path} --device cpu --timeout 30.0 --no-restart"
    assert command == f"-m torch.distributed.run --standalone --nproc-per-node 4 --max-restarts 2 {worker}"
