"""Paired t-tests of Split-FG against the others over the folds: ``python -m splitfg.experiments.tabular.ttests``.

The folds of a cross-validation share training rows, so these p-values are too small, here as in the paper.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from splitfg.experiments.tabular import EXPERIMENT
from splitfg.experiments.tabular._sets import DATA, METHOD_TITLES, DataRow
from splitfg.runs import RunRecord, read_records, to_json


@dataclass(frozen=True)
class PairedTest:
    """Split-FG against one method on one data set.

    Attributes:
        lead: By how much Split-FG is better on average, in points of accuracy or in RMSE.
        t: The statistic; positive where Split-FG is better.
        p: Two-sided.
        folds: How many folds both have.
    """

    dataset: str
    method: str
    lead: float
    t: float
    p: float
    folds: int


def paired_tests(records: Iterable[RunRecord]) -> tuple[PairedTest, ...]:
    """All tests for which both sides have at least two folds, in the order of the table."""
    values = _by_preset(records)
    tests = []
    for row in DATA:
        ours = values.get(f"{row.name}-split_fg", {})
        for method in METHOD_TITLES:
            theirs = values.get(f"{row.name}-{method}", {})
            folds = sorted(ours.keys() & theirs.keys())
            if method != "split_fg" and len(folds) >= 2:
                tests.append(_test(row, method, [ours[k] for k in folds], [theirs[k] for k in folds]))
    return tuple(tests)


def _by_preset(records: Iterable[RunRecord]) -> dict[str, dict[int, float]]:
    """The metric of every finished run with its preset's own settings, by preset and fold."""
    metric = {f"{row.name}-{method}": row.metric for row in DATA for method in row.paper}
    configs = {preset.name: to_json(preset.config) for preset in EXPERIMENT.presets}
    values: dict[str, dict[int, float]] = {}
    for report in (record.report for record in records):
        plain = report.experiment == EXPERIMENT.name and configs.get(report.preset) == report.config
        if plain and report.status == "done":
            values.setdefault(report.preset, {})[report.seed] = report.metrics[metric[report.preset]]
    return values


def _test(row: DataRow, method: str, ours: Sequence[float], theirs: Sequence[float]) -> PairedTest:
    from scipy.stats import ttest_rel

    sign = 1.0 if row.metric == "accuracy" else -1.0
    t, p = ttest_rel([sign * v for v in ours], [sign * v for v in theirs])
    lead = sum(sign * (a - b) for a, b in zip(ours, theirs, strict=True)) / len(ours)
    return PairedTest(row.name, method, lead, float(t), float(p), len(ours))


def to_markdown(tests: Iterable[PairedTest]) -> str:
    """A table of data sets by methods: Split-FG's lead, and p."""
    by_place = {(test.dataset, test.method): test for test in tests}
    methods = [m for m in METHOD_TITLES if m != "split_fg"]
    lines = [["Split-FG's lead over", *(METHOD_TITLES[m] for m in methods)], ["---"] * (len(methods) + 1)]
    lines += [[row.label, *(_cell(row, by_place.get((row.name, m))) for m in methods)] for row in DATA]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(row: DataRow, test: PairedTest | None) -> str:
    if test is None:
        return "–"
    return f"{test.lead:+.{1 if row.metric == 'accuracy' else 3}f} (p = {test.p:.2g})"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tests of all runs there are."""
    parser = argparse.ArgumentParser(description="Paired t-tests of Split-FG against the other methods over the folds.")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of run folders")
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder of results files")
    options: Mapping[str, Path] = vars(parser.parse_args(arguments))
    print(to_markdown(paired_tests(read_records(options["runs"], options["results"]).runs)))


if __name__ == "__main__":
    main()
