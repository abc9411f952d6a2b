"""Paired t-tests over folds, against a worked example."""

import math

import pytest

pytest.importorskip("scipy")

from splitfg.experiments.tabular import EXPERIMENT
from splitfg.experiments.tabular.ttests import main, paired_tests, to_markdown
from splitfg.runs import RunRecord, RunReport, to_json


def record(preset, fold, metrics, config=None, status="done"):
    report = RunReport(
        experiment="tabular",
        preset=preset,
        seed=fold,
        status=status,
        metrics=metrics,
        versions={},
        git=None,
        git_dirty=None,
        device="cpu",
        threads=1,
        started="",
        finished="",
        wall_s=1.0,
        steps=1,
        step_ms=None,
        peak_memory_mib=1.0,
        memory_kind="",
        jvps_per_step=None,
        trunk_backward=None,
        config=to_json(EXPERIMENT.preset(preset).config) if config is None else config,
    )
    return RunRecord(report, (), "test")


def folds(preset, metric, values):
    return [record(preset, fold, {metric: value}) for fold, value in enumerate(values)]


def test_a_worked_example():
    # differences 1, 2, 3, 4, 5: mean 3, standard deviation sqrt(2.5), t = 3 / sqrt(2.5 / 5) = 3 sqrt(2)
    ours = folds("adult-split_fg", "accuracy", [71.0, 72.0, 73.0, 74.0, 75.0])
    theirs = folds("adult-es", "accuracy", [70.0] * 5)
    (test,) = paired_tests([*ours, *theirs])
    assert (test.dataset, test.method, test.folds) == ("adult", "es", 5)
    assert test.lead == pytest.approx(3.0)
    assert test.t == pytest.approx(3 * math.sqrt(2))
    # four degrees of freedom: P(|T| > t) = 1 - s (3 - s²) / 2 with s = t / sqrt(4 + t²)
    s = test.t / math.sqrt(4 + test.t**2)
    assert test.p == pytest.approx(1 - s * (3 - s**2) / 2)


def test_a_smaller_error_is_a_lead():
    ours = folds("california-split_fg", "rmse", [0.5, 0.51, 0.52])
    theirs = folds("california-pure_fg", "rmse", [0.6, 0.62, 0.61])
    (test,) = paired_tests([*ours, *theirs])
    assert test.lead == pytest.approx(0.1)
    assert test.t > 0


def test_folds_are_paired_by_number_and_only_finished_plain_runs_count():
    ours = folds("adult-split_fg", "accuracy", [1.0, 2.0, 4.0])
    theirs = [record("adult-es", fold, {"accuracy": 0.0}) for fold in (2, 1, 7)]
    other = to_json(EXPERIMENT.preset("adult-es").config) | {"steps": 2}
    strangers = [record("adult-es", 0, {"accuracy": 9.0}, config=other), record("adult-es", 0, {}, status="diverged")]
    (test,) = paired_tests([*ours, *theirs, *strangers])
    assert test.folds == 2
    assert test.lead == pytest.approx(3.0)


def test_the_table_has_a_cell_for_every_test():
    ours = folds("adult-split_fg", "accuracy", [1.0, 2.0, 4.0])
    text = to_markdown(paired_tests([*ours, *folds("adult-es", "accuracy", [0.0, 0.0, 0.0])]))
    adult = next(line for line in text.splitlines() if line.startswith("| Adult"))
    assert "+2.3 (p = " in adult
    assert adult.count("–") == 5


def test_no_runs_give_an_empty_table(tmp_path, capsys):
    main(["--runs", str(tmp_path), "--results", str(tmp_path)])
    assert "Otto" in capsys.readouterr().out
