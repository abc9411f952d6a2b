"""Conclusions in words, of docs/_parts/when-not-to-use.md, against the recorded runs."""

from functools import cache
from pathlib import Path
from statistics import fmean

import pytest

from splitfg_lab.experiments.tabular import EXPERIMENT, FOLDS
from splitfg_lab.experiments.tabular._sets import DATA
from splitfg_lab.runs.results import read_results

ROOT = Path(__file__).parents[2]
UNCOMMITTED = {
    *(f"{data}-{m}" for data in ("black_friday", "california", "diamond", "house_16h") for m in ("es", "pure_fg")),
    *(f"{data}-split_fg" for data in ("black_friday", "california", "covertype", "diamond", "house_16h", "otto")),
    "covertype-backprop",
}
"""Presets with runs that were recorded from uncommitted code; run them again from a clean revision to shorten this."""


@cache
def recorded():
    """Metrics of the runs made as the presets say, by preset and fold."""
    reports = [record.report for record in read_results(ROOT / "results" / "tabular.json")]
    presets = {preset.name: preset for preset in EXPERIMENT.presets}
    found = [r for r in reports if not EXPERIMENT.changes(presets[r.preset], r.config)]
    return {(r.preset, r.seed): r.metrics for r in found}


def mean(row, method):
    return fmean(recorded()[f"{row.name}-{method}", fold][row.metric] for fold in range(FOLDS))


def lead(row, method, over):
    """By how much a method is better, in points of accuracy or in RMSE."""
    difference = mean(row, method) - mean(row, over)
    return difference if row.better == "higher" else -difference


@pytest.mark.parametrize("row", DATA, ids=lambda row: row.name)
def test_what_is_said_of_all_eight_tables(row):
    forward_only = [method for method in (*row.paper, "activity_fg") if method != "backprop"]
    assert all(lead(row, "boosting", over) > 0 for over in forward_only)
    assert lead(row, "backprop", "activity_fg") > 0
    assert lead(row, "sklearn_mlp", "backprop") > 0
    assert lead(row, "activity_fg", "linear") > 0


def test_what_is_said_of_some():
    classes = [row for row in DATA if row.metric == "accuracy"]
    assert [row.name for row in classes if lead(row, "linear", "split_fg") > 0] == ["higgs_small", "otto", "covertype"]
    (otto,) = [row for row in DATA if row.name == "otto"]
    assert lead(otto, "activity_fg", "linear") < 1


def test_no_other_recorded_run_comes_from_uncommitted_code():
    runs = [record.report for record in read_results(ROOT / "results" / "tabular.json")]
    assert {run.preset for run in runs if run.git_dirty} == UNCOMMITTED
