"""Runs of one made-up experiment, grouped by preset, for the tests of the report's tables."""

from __future__ import annotations

from typing import Any

from report_samples import Config, report_json

from splitfg_lab.experiments.spec import Experiment, Preset
from splitfg_lab.report._groups import PresetRuns, group_runs
from splitfg_lab.runs.config import from_json
from splitfg_lab.runs.record import RunReport
from splitfg_lab.runs.results import RunRecord

PRESETS = ("a", "b", "c", "d", "e", "f")


def run(
    preset: str, value: float | None, seed: int = 0, *, source: str = "runs/e/p/seed0", **changes: Any
) -> RunRecord:
    metrics = {} if value is None else {"accuracy": value}
    report = report_json("e", preset, seed, **({"metrics": metrics} | changes))
    return RunRecord(from_json(RunReport, report), (), source)


def diverged(preset: str, seed: int = 0) -> RunRecord:
    return run(preset, 12.0, seed, status="diverged", message="loss is nan")


def groups(*runs: RunRecord, seeds: tuple[int, ...] = (0,)) -> dict[str, PresetRuns]:
    presets = tuple(Preset(name, name.upper(), Config(), seeds=seeds) for name in PRESETS)
    return group_runs(Experiment("e", "E", "here", "m:f", presets), runs)
