"""Tables filled from runs: what a cell says in every state, who is best, what is kept apart."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from report_runs import diverged, groups, run
from report_samples import Config, Step, config_json

from splitfg_lab.experiments.spec import Cell, Experiment, Paper, Preset, Row, Table, identity_in
from splitfg_lab.report._cell_view import CellView
from splitfg_lab.report._groups import group_runs
from splitfg_lab.report._markdown import _filled
from splitfg_lab.report._series import _paper_values
from splitfg_lab.report._table_view import TableView, view_table
from splitfg_lab.runs.results import RunRecord, by_config

EXPERIMENT = Experiment("e", "E", "here", "m:f", ())


def cell(*runs: RunRecord, paper: Paper | None = None, seeds: tuple[int, ...] = (0,), **options: Any) -> CellView:
    table = Table("t", "T", ("x",), (Row("r", (Cell("a", "accuracy", paper),)),), **options)
    return view_table(table, groups(*runs, seeds=seeds)).rows[0].cells[0]


def grid(rows: list[list[Cell]], *runs: RunRecord, better: Any = "higher", best_in: Any = "row") -> TableView:
    columns = tuple(f"c{j}" for j in range(len(rows[0])))
    made = tuple(Row(f"r{i}", tuple(cells)) for i, cells in enumerate(rows))
    table = Table("t", "T", columns, made, better=better, best_in=best_in)
    return view_table(table, groups(*runs))


def seeds(preset: str, value: float, count: int = 3, **changes: Any) -> list[RunRecord]:
    return [run(preset, value, seed, **changes) for seed in range(count)]


def best(view: TableView, mark: str = "best") -> list[tuple[int, int]]:
    return [(i, j) for i, row in enumerate(view.rows) for j, cell in enumerate(row.cells) if getattr(cell, mark)]


class TestCell:
    def test_mean_spread_count_paper_and_difference(self):
        # 1, 2, 6: mean 3, squared deviations 4 + 1 + 9 = 14, / 2 = 7
        view = cell(*(run("a", v, s) for s, v in enumerate([1.0, 2.0, 6.0])), paper=Paper(2.5, 0.25), seeds=(0, 1, 2))
        assert (view.text, view.state, view.note) == ("3.0 ± 2.6 (3)", "measured", "")
        assert (view.paper, view.difference, view.value) == ("2.5 ± 0.2", "+0.5", 3.0)

    def test_not_run_still_shows_the_paper(self):
        view = cell(paper=Paper(2.5))
        assert (view.text, view.state, view.paper, view.difference) == ("not run", "not run", "2.5", "")

    def test_no_paper_no_difference(self):
        view = cell(run("a", 3.0))
        assert (view.paper, view.difference, view.verdict) == ("", "", "")

    def test_a_diverged_run_is_shown_and_its_last_numbers_are_not(self):
        view = cell(diverged("a"), paper=Paper(2.5))
        assert (view.text, view.state, view.value, view.difference) == ("diverged", "diverged", None, "")

    def test_one_diverged_among_others_is_counted_beside_the_mean_of_the_rest(self):
        view = cell(run("a", 4.0), run("a", 6.0, 1), diverged("a", 2), seeds=(0, 1, 2))
        assert (view.text, view.note) == ("5.0 ± 1.4 (2)", "1 of 3 diverged")

    def test_missing_seeds_are_counted(self):
        assert cell(run("a", 4.0), run("a", 6.0, 1), seeds=(0, 1, 2, 3, 4)).note == "2 of 5 seeds"

    def test_a_metric_nobody_reported_is_no_value_and_not_zero(self):
        view = cell(run("a", None))
        assert (view.text, view.state, view.value) == ("no value", "missing", None)

    def test_one_report_without_the_metric_is_counted(self):
        assert cell(run("a", 4.0), run("a", None, 1), seeds=(0, 1)).note == "1 without a value"

    def test_words_and_absent_methods_are_printed_as_they_are(self):
        table = Table("t", "T", ("x", "y"), (Row("r", ("CE", None)),))
        texts = [c.text for c in view_table(table, groups()).rows[0].cells]
        assert texts == ["CE", "–"]

    def test_quantities_of_the_report_can_stand_in_a_table(self):
        table = Table("t", "T", ("ms",), (Row("r", (Cell("a", "step_ms", Paper(8.5)),)),), decimals=2)
        view = view_table(table, groups(run("a", 1.0, step_ms=4.25))).rows[0].cells[0]
        assert (view.text, view.difference) == ("4.25 (1)", "−4.25 (−50.0%)")

    @pytest.mark.parametrize(
        ("ours", "better", "verdict"),
        [
            (3.0, "higher", "better"),
            (3.0, "lower", "worse"),
            (2.0, "higher", "worse"),
            (2.0, "lower", "better"),
            (2.51, "higher", "same"),
            (3.0, None, ""),
        ],
    )
    def test_verdict_follows_the_tables_direction(self, ours, better, verdict):
        assert cell(run("a", ours), paper=Paper(2.5), better=better).verdict == verdict

    def test_accuracies_differ_by_points_other_metrics_also_by_percent(self):
        assert "%" not in cell(run("a", 3.0), paper=Paper(2.5)).difference
        table = Table("t", "T", ("x",), (Row("r", (Cell("a", "ppl", Paper(2.0)),)),))
        view = view_table(table, groups(run("a", None, metrics={"ppl": 3.0}))).rows[0].cells[0]
        assert view.difference == "+1.0 (+50.0%)"

    @pytest.mark.parametrize("metric", ["memsave_percent", "saved/split_fg", "trunk_share"])
    def test_so_do_all_shares(self, metric):
        table = Table("t", "T", ("x",), (Row("r", (Cell("a", metric, Paper(12.7)),)),))
        view = view_table(table, groups(run("a", None, metrics={metric: 28.8}))).rows[0].cells[0]
        assert view.difference == "+16.1"

    def test_a_ratio_of_shares_is_no_share(self):
        ratio, _ = (
            grid([[Cell("a", "accuracy", Paper(1.0), over="b"), "-"]], run("a", 3.0), run("b", 2.0)).rows[0].cells
        )
        assert ratio.difference == "+0.5 (+50.0%)"


class TestOverrides:
    CHANGED = config_json(Config(), K=4)

    def test_runs_with_overrides_stay_out_of_the_mean_and_carry_a_dagger(self):
        table = Table("t", "T", ("x",), (Row("r", (Cell("a", "accuracy"),)),))
        view = view_table(table, groups(run("a", 3.0), run("a", 9.0, config=self.CHANGED)))
        shown = view.rows[0].cells[0]
        assert (shown.text, [(v.text, v.mark) for v in shown.variants]) == ("3.0 (1)", [("9.0 (1)", "†1")])
        assert view.footnotes == (("†1", "Run with K=4 (preset: 8)."),)

    def test_only_overrides_leaves_the_preset_itself_not_run(self):
        shown = cell(run("a", 9.0, config=self.CHANGED), paper=Paper(2.5))
        assert (shown.text, shown.difference, shown.variants[0].text) == ("not run", "", "9.0 (1)")

    def test_overrides_that_did_not_measure_a_metric_are_left_out(self):
        assert cell(run("a", 3.0), run("a", None, config=self.CHANGED)).variants == ()

    def test_the_same_override_has_the_same_dagger_and_another_one_the_next(self):
        other = config_json(Config(), K=2)
        view = grid(
            [[Cell("a", "accuracy"), Cell("b", "accuracy")]],
            run("a", 1.0, config=self.CHANGED),
            run("b", 2.0, config=self.CHANGED),
            run("b", 3.0, config=other),
        )
        marks = [[v.mark for v in c.variants] for c in view.rows[0].cells]
        assert marks[0] == ["†1"]
        assert sorted(marks[1]) == ["†1", "†2"]
        assert len(view.footnotes) == 2

    def test_changes_name_nested_fields_and_ignore_how_a_number_is_written(self):
        config = Config(step=Step(lr=1.0))
        preset = Preset("a", "", config)
        assert EXPERIMENT.changes(preset, config_json(config)) == ()
        same = config_json(config) | {"step": {"type": "Step", "lr": 1, "rho": 1}}
        assert EXPERIMENT.changes(preset, same) == ()
        changed = config_json(config) | {"step": {"type": "Step", "lr": 1.0, "rho": 0.03}}
        assert EXPERIMENT.changes(preset, changed) == ("step.rho=0.03 (preset: 1.0)",)

    def test_runs_are_the_same_where_they_depart_from_the_preset_in_the_same_way(self):
        forgiving = replace(EXPERIMENT, presets=(Preset("a", "A", Config()),), immaterial=("clip",))
        identity = identity_in([forgiving])
        first, second, third = (
            identity(run("a", 1.0, config=config_json(Config()) | change).report)
            for change in ({}, {"clip": 1.0}, {"K": 2})
        )
        assert first == second != third
        stranger = run("b", 1.0, config=config_json(Config())).report
        assert identity(stranger) == by_config(stranger)

    def test_fields_that_came_or_went_are_changes(self):
        recorded = config_json(Config()) | {"clip": 1.0}
        del recorded["K"]
        found = EXPERIMENT.changes(Preset("a", "", Config()), recorded)
        assert set(found) == {"K=absent (preset: 8)", "clip=1.0 (preset: absent)"}

    def test_an_experiment_says_which_fields_are_immaterial_and_what_held_before_a_field(self):
        recorded = config_json(Config()) | {"clip": 1.0}
        del recorded["K"]
        forgiving = replace(EXPERIMENT, immaterial=("clip",), earlier=(("K", 8),))
        preset = Preset("a", "", Config())
        assert forgiving.changes(preset, recorded) == ()
        assert replace(forgiving, earlier=(("K", 4),)).changes(preset, recorded) == ("K=4 (preset: 8)",)
        assert forgiving.changes(preset, recorded | {"K": 2}) == ("K=2 (preset: 8)",)


class TestRatios:
    def test_a_ratio_is_that_of_the_means(self):
        cells = [Cell("a", "accuracy", Paper(0.6), 2, over="b"), Cell("b", "accuracy")]
        ratio, _ = grid([cells], run("a", 1.0, seed=0), run("a", 3.0, seed=1), run("b", 4.0)).rows[0].cells
        assert (ratio.text, ratio.value, ratio.paper) == ("0.50", 0.5, "0.6")

    def test_what_is_missing_on_either_side_is_said(self):
        cells = [Cell("a", "accuracy", over="b"), Cell("b", "accuracy", over="a"), Cell("b", "accuracy", over="b")]
        states = [c.state for c in grid([cells], run("b", 4.0)).rows[0].cells]
        assert states == ["not run", "not run", "measured"]
        assert grid([cells], run("a", 1.0), diverged("b")).rows[0].cells[0].state == "diverged"

    def test_a_ratio_is_no_value_of_its_metric(self):
        """Neither in figures, nor in footnotes, nor where values compete."""
        ratio, value = Cell("a", "accuracy", Paper(0.6), over="b"), Cell("b", "accuracy", Paper(4.0))
        table = Table("t", "T", ("x", "y"), (Row("r", (ratio, value)),))
        assert _paper_values(replace(EXPERIMENT, tables=(table,))) == {("b", "accuracy"): Paper(4.0)}
        view = grid([[ratio, Cell("c", "accuracy")]], run("a", 1.0), run("b", 4.0), run("c", 0.1))
        assert best(view) == []
        changed = run("a", 1.0, config=config_json(Config(), K=2))
        assert grid([[ratio]], changed, run("b", 4.0)).footnotes == ()

    def test_the_run_divided_by_is_part_of_what_the_table_rests_on(self):
        view = grid([[Cell("a", "accuracy", over="b")]], run("a", 1.0), run("b", 4.0))
        assert "2 runs" in view.provenance.line


class TestDigits:
    def test_a_cell_may_have_digits_of_its_own(self):
        rows = [[Cell("a", "accuracy", Paper(1.25), decimals=2), Cell("b", "accuracy")]]
        first, second = grid(rows, run("a", 1.234), run("b", 1.234)).rows[0].cells
        assert (first.text, first.paper, second.text) == ("1.23 (1)", "1.25", "1.2 (1)")

    def test_ties_are_judged_at_the_digits_shown(self):
        rows = [[Cell("a", "accuracy", decimals=0), Cell("b", "accuracy", decimals=0)]]
        assert best(grid(rows, *seeds("a", 1.1), *seeds("b", 1.2))) == [(0, 0), (0, 1)]


class TestBest:
    def test_methods_along_a_row_compete_within_the_row(self):
        rows = [[Cell(p, "accuracy") for p in "abc"], [Cell(p, "accuracy") for p in "def"]]
        view = grid(rows, *(run(p, v) for p, v in zip("abcdef", [1, 3, 2, 9, 8, 7], strict=True)))
        assert best(view) == [(0, 1), (1, 0)]

    def test_settings_along_a_column_compete_within_the_column(self):
        rows = [[Cell(a, "accuracy"), Cell(b, "accuracy")] for a, b in ("ad", "be", "cf")]
        view = grid(rows, *(run(p, v) for p, v in zip("abcdef", [1, 3, 2, 9, 8, 7], strict=True)), best_in="column")
        assert best(view) == [(0, 1), (1, 0)]

    def test_in_a_grid_of_settings_all_compete(self):
        rows = [[Cell(p, "accuracy") for p in "abc"], [Cell(p, "accuracy") for p in "def"]]
        view = grid(rows, *(run(p, v) for p, v in zip("abcdef", [1, 3, 2, 9, 8, 7], strict=True)), best_in="table")
        assert best(view) == [(1, 0)]

    def test_what_is_not_ranked_is_never_best(self):
        view = grid(
            [[Cell("a", "accuracy", ranked=False), Cell("b", "accuracy"), Cell("c", "accuracy")]],
            *(run(p, v) for p, v in zip("abc", [9, 3, 2], strict=True)),
        )
        assert best(view) == [(0, 1)]

    def test_different_metrics_never_compete(self):
        metrics = {"nll": 1.0, "ppl": 3.0, "ms": 2.0}
        rows = [[Cell(p, m) for m in metrics] for p in "ab"]
        view = grid(
            rows,
            *seeds("a", 0.0, metrics=metrics),
            *seeds("b", 0.0, metrics={"nll": 2.0, "ppl": 2.0, "ms": 2.0}),
            better="lower",
            best_in="column",
        )
        assert best(view) == [(0, 0), (0, 2), (1, 1), (1, 2)]  # a tie is won by both

    def test_the_best_without_a_backward_pass_is_marked_on_its_own(self):
        rows = [[Cell(p, "accuracy") for p in "abc"]]
        view = grid(rows, run("a", 9.0, trunk_backward=1.0), run("b", 5.0), run("c", 6.0))
        assert (best(view), best(view, "best_forward")) == ([(0, 0)], [(0, 2)])

    def test_a_method_that_did_not_say_is_not_called_forward_only(self):
        rows = [[Cell(p, "accuracy") for p in "abc"]]
        view = grid(rows, run("a", 9.0, trunk_backward=None), run("b", 5.0), run("c", 6.0))
        assert best(view, "best_forward") == [(0, 2)]

    def test_no_direction_no_winner_and_nobody_wins_alone(self):
        rows = [[Cell("a", "accuracy"), Cell("b", "accuracy")]]
        assert best(grid(rows, run("a", 1.0), run("b", 2.0), better=None)) == []
        assert best(grid(rows, run("a", 1.0))) == []
        assert best(grid(rows, run("a", 1.0), diverged("b"))) == []

    @pytest.mark.parametrize(("first", "second", "ranked"), [(1, 3, False), (3, 1, False), (2, 2, False), (3, 3, True)])
    def test_a_small_gap_needs_three_seeds_on_both_sides(self, first, second, ranked):
        rows = [[Cell("a", "accuracy"), Cell("b", "accuracy"), Cell("c", "accuracy")]]
        view = grid(rows, *seeds("a", 60.0, first), *seeds("b", 58.0, second), run("c", 20.0))
        assert best(view) == best(view, "best_forward") == ([(0, 0)] if ranked else [])

    def test_numbers_within_two_standard_errors_of_the_best_are_marked_with_it(self):
        # deviations of 1 over 4 runs: each mean has an error of 0.5, their differences one of 0.71
        spread = (-math.sqrt(0.75), -math.sqrt(0.75), math.sqrt(0.75), math.sqrt(0.75))
        means = {"a": 60.0, "b": 59.0, "c": 58.0}
        runs = [run(p, mean + x, seed) for p, mean in means.items() for seed, x in enumerate(spread)]
        view = grid([[Cell(p, "accuracy") for p in "abc"]], *runs)
        assert best(view) == [(0, 0), (0, 1)]

    def test_a_large_gap_needs_one_seed(self):
        rows = [[Cell("a", "accuracy"), Cell("b", "accuracy")]]
        assert best(grid(rows, run("a", 60.0), run("b", 56.0))) == [(0, 0)]  # 4 of 60 is more than 5%

    def test_a_count_model_is_never_the_best_without_a_backward_pass(self):
        presets = (Preset("a", "Bigram", Config(), counts=True), Preset("b", "B", Config()), Preset("c", "C", Config()))
        table = Table("t", "T", ("x", "y", "z"), (Row("r", tuple(Cell(p, "accuracy") for p in "abc")),), "lower", "row")
        runs = [run("a", 200.0), run("b", 400.0), run("c", 700.0)]
        view = view_table(table, group_runs(Experiment("e", "E", "here", "m:f", presets), runs))
        assert (best(view), best(view, "best_forward")) == ([(0, 0)], [(0, 1)])

    def test_overrides_do_not_compete(self):
        rows = [[Cell("a", "accuracy"), Cell("b", "accuracy"), Cell("c", "accuracy")]]
        changed = run("c", 99.0, config=config_json(Config(), K=4))
        assert best(grid(rows, run("a", 1.0), run("b", 2.0), changed)) == [(0, 1)]


def test_rows_that_were_not_run_collapse_to_a_line():
    rows = (Row("Run", (Cell("a", "accuracy"),)), Row("Not yet", (Cell("b", "accuracy"),)))
    table = Table("t", "t", ("Top-1",), rows, collapse=True)
    view = view_table(table, groups(run("a", 60.0)))
    assert [row.label for row in view.rows] == ["Run"]
    assert [left_out.line for left_out in view.left_out] == ["Not run: Not yet."]
    assert [row.label for row in view_table(table, groups()).rows] == ["Run", "Not yet"]  # a table keeps its rows


def test_columns_that_were_not_run_collapse_too():
    done, open_, quoted = Cell("a", "accuracy"), Cell("b", "accuracy"), Cell("b", "accuracy", Paper(3.0))
    rows = (
        Row("Same", ("words", open_, None, quoted)),
        Row("Same", ("words", open_, None, None)),
        Row("Run", ("more", open_, done, open_)),
    )
    table = Table("t", "t", ("Words", "Never", "Run", "In the paper"), rows, collapse=True)
    view = view_table(table, groups(run("a", 60.0)))
    assert [column.name for column in view.columns] == ["Words", "Run", "In the paper"]
    assert [(row.label, len(row.cells)) for row in view.rows] == [("Same", 3), ("Run", 3)]
    assert [left_out.line for left_out in view.left_out] == ["Not run: Same, words; the column Never."]
    assert "|  | Words | Run | In the paper |" in "\n".join(_filled(view))


def test_rows_with_fewer_numbers_than_asked_for_collapse_too():
    one, other, open_ = Cell("a", "accuracy"), Cell("b", "accuracy"), Cell("c", "accuracy")
    quoted = Cell("c", "accuracy", Paper(3.0))
    rows = (
        Row("Two", (one, other, None)),
        Row("One", (open_, None, one)),
        Row("With the paper's", (one, quoted, None)),
        Row("None", (open_, open_, None)),
    )
    table = Table("t", "t", ("First", "Second", "Third"), rows, collapse=True, fewest=2)
    view = view_table(table, groups(run("a", 60.0), run("b", 50.0)))
    assert [row.label for row in view.rows] == ["Two", "With the paper's"]
    assert [column.name for column in view.columns] == ["First", "Second"]  # the third has no number any more
    assert [left_out.line for left_out in view.left_out] == ["Not run: None.", "Fewer than 2 numbers: One."]


def test_long_lists_of_what_was_not_run_are_folded():
    rows = tuple(Row(f"row {i}", (Cell("b", "accuracy"),)) for i in range(4))
    table = Table("t", "t", ("Top-1",), (Row("Run", (Cell("a", "accuracy"),)), *rows), collapse=True)
    text = "\n".join(_filled(view_table(table, groups(run("a", 60.0)))))
    assert "<details><summary>Not run: 4 rows or columns</summary>\n- row 0\n- row 1" in text


def test_reverse_passes_inside_blocks_are_no_forward_only_method():
    runs = [run("a", 60.0, trunk_backward=0.0), run("b", 70.0, trunk_backward=0.0, block_backward=4.0)]
    view = grid(
        [[Cell("a", "accuracy"), Cell("b", "accuracy")], [Cell("a", "block_backward"), Cell("b", "block_backward")]],
        *runs,
    )
    first, second = view.rows
    assert [c.forward_only for c in first.cells] == [True, False]
    assert [c.value for c in second.cells] == [0.0, 4.0]
