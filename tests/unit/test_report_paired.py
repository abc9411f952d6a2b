"""Paired t-tests in tables, against worked examples."""

from __future__ import annotations

import math
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1]))
from report_samples import Config, config_json, report_json

from splitfg_lab.experiments.spec import Cell, Experiment, Paired, Preset, Row, Table
from splitfg_lab.report._groups import PresetRuns, group_runs
from splitfg_lab.report._html import render_html
from splitfg_lab.report._markdown import render_markdown
from splitfg_lab.report._paired import holm, p_text, paired_test
from splitfg_lab.report._table_view import TableView, view_table
from splitfg_lab.report._terminal import render_terminal
from splitfg_lab.report._views import ExperimentView, ReportView
from splitfg_lab.runs.config import from_json
from splitfg_lab.runs.record import RunReport
from splitfg_lab.runs.results import RunRecord


def runs(preset: str, *values: float, seeds: Any = None, **changes: Any) -> list[RunRecord]:
    places = range(len(values)) if seeds is None else seeds
    reports = [report_json("e", preset, s, metrics={"m": v}, **changes) for s, v in zip(places, values, strict=True)]
    return [RunRecord(from_json(RunReport, report), (), "runs/e/p/seed0") for report in reports]


def experiment(*tables: Table) -> Experiment:
    presets = tuple(Preset(name, name.upper(), Config(), seeds=(0, 1, 2, 3, 4)) for name in "abc")
    return Experiment("e", "E", "here", "m:f", presets, tables)


def groups(*records: list[RunRecord]) -> dict[str, PresetRuns]:
    return group_runs(experiment(), [run for some in records for run in some])


def against(*names: str, better: Any = "higher") -> Table:
    return Table("t", "T", names, (Row("r", tuple(Paired("a", n, "m", better) for n in names)),))


def texts(view: TableView) -> list[tuple[str, str]]:
    return [(cell.text, cell.note) for cell in view.rows[0].cells]


# differences 1, 2, 3, 4, 5: mean 3, deviation sqrt(2.5), t = 3 / sqrt(2.5 / 5) = 3 sqrt(2)
OURS, THEIRS = runs("a", 71.0, 72.0, 73.0, 74.0, 75.0), runs("b", *[70.0] * 5)
# four degrees of freedom: P(|T| > t) = 1 - s (3 - s²) / 2 with s = t / sqrt(4 + t²)
S = 3 * math.sqrt(2) / math.sqrt(4 + 18)
P = 1 - S * (3 - S**2) / 2  # 0.01324


class TestPaired:
    def test_a_worked_example(self):
        test = paired_test(Paired("a", "b", "m", "higher"), groups(OURS, THEIRS))
        assert test is not None
        assert (test.lead, test.n) == (pytest.approx(3.0), 5)
        assert test.t == pytest.approx(3 * math.sqrt(2))
        assert test.p == pytest.approx(P)

    def test_a_smaller_error_is_a_lead(self):
        test = paired_test(Paired("b", "a", "m", "lower"), groups(OURS, THEIRS))
        assert test is not None
        assert test.lead == pytest.approx(3.0)

    def test_values_are_paired_by_seed_and_only_finished_plain_runs_count(self):
        others = [
            *runs("b", 0.0, 0.0, 0.0, seeds=(2, 1, 7)),
            *runs("b", 9.0, config=config_json(Config(), K=4)),
            *runs("b", 9.0, seeds=(3,), status="diverged", message="loss is nan"),
        ]
        test = paired_test(Paired("a", "b", "m", "higher"), groups(runs("a", 1.0, 2.0, 4.0, 8.0), others))
        assert test is not None
        assert (test.n, test.lead) == (2, 3.0)  # seeds 1 and 2: 2 and 4

    @pytest.mark.parametrize(
        ("n", "t", "p"), [(2, 12.706, 0.05), (3, 4.303, 0.05), (10, 2.262, 0.05), (5, 4.604, 0.01)]
    )
    def test_p_follows_the_printed_quantiles(self, n, t, p):
        # leads of mean m and deviation 1 give t = m sqrt(n)
        spread = [(-1.0) ** i for i in range(n - n % 2)] + [0.0] * (n % 2)
        deviation = math.sqrt(sum(x * x for x in spread) / (n - 1))
        leads = [t / math.sqrt(n) + x / deviation for x in spread]
        test = paired_test(Paired("a", "b", "m", "higher"), groups(runs("a", *leads), runs("b", *[0.0] * n)))
        assert test is not None
        assert test.t == pytest.approx(t)
        assert test.p == pytest.approx(p, rel=1e-3)

    def test_nothing_in_common_is_no_test(self):
        assert paired_test(Paired("a", "b", "m", "higher"), groups(OURS)) is None


class TestHolm:
    def test_a_worked_example(self):
        # sorted 0.01, 0.02, 0.03, 0.04 times 4, 3, 2, 1 is 0.04, 0.06, 0.06, 0.04; never below the one before
        assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])

    def test_at_most_one_and_one_test_stays(self):
        assert holm([0.6, 0.9]) == [1.0, 1.0]
        assert holm([0.3]) == [0.3]
        assert holm([]) == []

    @pytest.mark.parametrize(("p", "text"), [(0.0123, "p = 0.012"), (1.0, "p = 1"), (3e-5, "p < 0.0001")])
    def test_text(self, p, text):
        assert p_text(p) == text


class TestTable:
    def test_a_cell_says_lead_p_and_t(self):
        view = view_table(against("b"), groups(OURS, THEIRS))
        assert texts(view) == [("+3.0, p = 0.013", "t(4) = +4.2")]
        assert view.footnotes[-1][0] == "p"
        assert "the 1 test " in view.footnotes[-1][1]
        assert view.columns[0].numeric
        assert view.provenance is not None
        assert view.provenance.line.startswith("10 runs")

    def test_tests_of_a_table_are_corrected_together(self):
        third = runs("c", 71.5, 72.0, 73.0, 74.0, 74.5)  # differences -0.5, 0, 0, 0, 0.5: mean 0, p = 1
        view = view_table(against("b", "c"), groups(OURS, THEIRS, third))
        assert texts(view) == [("+3.0, p = 0.026", "t(4) = +4.2"), ("0.0, p = 1", "t(4) = 0.0")]
        assert "the 2 tests " in view.footnotes[-1][1]

    def test_missing_seeds_are_counted_and_no_runs_are_not_run(self):
        view = view_table(against("b", "c"), groups(OURS, THEIRS[:3]))
        assert texts(view)[0] == ("+2.0, p = 0.074", "t(2) = +3.5, 3 of 5 seeds")
        assert view.rows[0].cells[1].state == "not run"

    def test_differences_that_do_not_vary_are_not_tested(self):
        view = view_table(against("b"), groups(runs("a", 2.0, 3.0), runs("b", 1.0, 2.0)))
        assert texts(view) == [("+1.0", "2 of 5 seeds, no test")]
        assert view.footnotes == ()

    def test_tests_and_measured_cells_can_share_a_table(self):
        row = Row("r", (Cell("a", "m"), Paired("a", "b", "m", "higher", decimals=2)))
        view = view_table(Table("t", "T", ("x", "y"), (row,)), groups(OURS, THEIRS))
        assert [cell.text for cell in view.rows[0].cells] == ["73.0 ± 1.6 (5)", "+3.00, p = 0.013"]

    def test_every_output_prints_them(self):
        table = against("b")
        made = groups(OURS, THEIRS)
        view = ExperimentView(experiment(table), (view_table(table, made),), None, made, {}, 10, 15, (), (), ())
        report = ReportView((view,), (), ())
        screen = Console(file=StringIO(), width=120)
        render_terminal(report, screen)
        for text in (render_markdown(report), render_html(report), screen.file.getvalue()):
            assert "+3.0, p = 0.013" in text
            assert "t(4) = +4.2" in text
            assert "Holm" in text
