"""Conclusions in words, of docs/_parts/when-not-to-use.md, against the recorded runs."""

from functools import cache
from pathlib import Path
from statistics import fmean, stdev

from splitfg_lab.experiments.tabular import EXPERIMENT, FOLDS
from splitfg_lab.experiments.tabular._sets import DATA
from splitfg_lab.runs.results import read_results

ROOT = Path(__file__).parents[2]


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


def spread(row, method):
    return stdev(recorded()[f"{row.name}-{method}", fold][row.metric] for fold in range(FOLDS))


def clear(row, method, over):
    """Whether a lead is larger than the spread of the folds of either method."""
    return lead(row, method, over) > max(spread(row, method), spread(row, over))


def sets(method, over):
    """Data sets on which a method is clearly better than another."""
    return {row.name for row in DATA if over in (*row.paper, "activity_fg", "linear") and clear(row, method, over)}


ALL = {row.name for row in DATA}


def test_gradient_boosting():
    for row in DATA:
        for over in {*row.paper, "activity_fg"} - {"backprop"}:
            assert clear(row, "boosting", over) == ((row.name, over) != ("covertype", "hopfield")), (row.name, over)


def test_networks():
    assert sets("backprop", "activity_fg") == ALL - {"diamond"}
    assert sets("sklearn_mlp", "activity_fg") == ALL


def test_linear_models():
    classes = {row.name for row in DATA if row.metric == "accuracy"}
    assert sets("linear", "split_fg") & classes == classes - {"adult"}
    assert sets("activity_fg", "linear") == ALL
    (otto,) = [row for row in DATA if row.name == "otto"]
    assert lead(otto, "activity_fg", "linear") < 1


def test_no_recorded_run_comes_from_uncommitted_code():
    runs = [record.report for record in read_results(ROOT / "results" / "tabular.json")]
    assert not {run.preset for run in runs if run.git_dirty}
