"""Recorded numbers and the paper's, for the tests of README and notes."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from splitfg_lab.experiments import EXPERIMENTS, Cell, Experiment
from splitfg_lab.runs import RunReport
from splitfg_lab.runs.results import read_results

ROOT = Path(__file__).parents[2]

Value = float | Callable[[], float]
"""A number, or a function that reads it from the records."""


@cache
def reports(experiment: str) -> list[RunReport]:
    return [record.report for record in read_results(ROOT / "results" / f"{experiment}.json")]


def experiment(name: str) -> Experiment:
    return {e.name: e for e in EXPERIMENTS}[name]


def runs_of(name: str, preset: str) -> list[RunReport]:
    """The runs that make up the preset's result: made as it says today, or, where there are none, as it said once."""
    found, of_preset = experiment(name), experiment(name).preset(preset)
    runs = [report for report in reports(name) if report.preset == preset]
    today = [r for r in runs if not found.changes(of_preset, r.config)]
    closest = max((found.closeness(of_preset, r.config) for r in today), default=None)
    return [r for r in today if found.closeness(of_preset, r.config) == closest] or runs


def recorded(name: str, preset: str, metric: str) -> float:
    """The mean over the seeds of the preset, all of which must be there, once."""
    runs, seeds = runs_of(name, preset), experiment(name).preset(preset).seeds
    assert sorted(r.seed for r in runs) == sorted(seeds), f"{name}/{preset}"
    return fmean(r.metrics[metric] for r in runs)


def by_seed(name: str, preset: str, metric: str) -> list[float]:
    return [r.metrics[metric] for r in sorted(runs_of(name, preset), key=lambda r: r.seed)]


def last(name: str, preset: str, metric: str, seed: int = 0) -> float:
    """The last point of the run's curve."""
    runs = read_results(ROOT / "results" / f"{name}.json")
    (run,) = [r for r in runs if (r.report.preset, r.report.seed) == (preset, seed)]
    return [point[metric] for point in run.curve if metric in point][-1]


def at_step(name: str, preset: str, metric: str, step: int, seed: int = 0) -> float:
    """The point of the run's curve at a step."""
    runs = read_results(ROOT / "results" / f"{name}.json")
    (run,) = [r for r in runs if (r.report.preset, r.report.seed) == (preset, seed)]
    (point,) = [point for point in run.curve if point["step"] == step and metric in point]
    return point[metric]


def paper(name: str, preset: str, metric: str) -> set[float]:
    """What the experiment's tables quote from the paper for this number."""
    cells = [c for table in experiment(name).tables for row in table.rows for c in row.cells if isinstance(c, Cell)]
    return {c.paper.mean for c in cells if c.paper and not c.over and (c.preset, c.metric) == (preset, metric)}


def shown(number: str, value: float) -> bool:
    """Whether a printed number is this value, rounded to the digits it is given with."""
    return number.replace(",", "") == f"{value:.{len(number.partition('.')[2])}f}"


@cache
def bench() -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / "recorded.json").read_text(encoding="utf-8"))
