"""Figures: the numbers behind the lines, and SVG that is sound, deterministic and safe to put into a page."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from report_samples import Config, Step, config_json, report_json

from splitfg_lab.experiments import EXPERIMENTS
from splitfg_lab.experiments.spec import Cell, Confusion, Curves, Experiment, Filters, Paper, Preset, Row, Sweep, Table
from splitfg_lab.report._figures import FigureView, view_figure
from splitfg_lab.report._groups import group_runs
from splitfg_lab.report._matrices import confusions
from splitfg_lab.report._methods import colour_of, method_in, method_of
from splitfg_lab.report._series import MAX_POINTS, curve_drawing, for_logarithms, sweep_drawing
from splitfg_lab.report._words import axis_labels
from splitfg_lab.runs.config import from_json
from splitfg_lab.runs.record import RunReport
from splitfg_lab.runs.results import RunRecord

RHOS = {"a": 0.3, "b": 0.03, "c": 0.1}
CURVES = Curves("curves", "Learning", ("a", "b"), "loss")
SWEEP = Sweep("sweep", "Step scale", ("a", "b", "c"), "step.rho", ("loss",))


def config(preset: str) -> Config:
    return Config(step=Step(rho=RHOS[preset]))


def run(preset: str, seed: int = 0, curve: list[dict[str, float]] | None = None, **changes: Any) -> RunRecord:
    fields = {"metrics": {"loss": 1.0}, "config": config_json(config(preset))} | changes
    return RunRecord(from_json(RunReport, report_json("e", preset, seed, **fields)), tuple(curve or ()), "runs")


def points(*values: float, step: int = 10) -> list[dict[str, float]]:
    return [{"step": i * step, "wall_s": i * 0.5, "loss": v} for i, v in enumerate(values)]


def experiment(*tables: Table, titles: str = "Preset {}") -> Experiment:
    presets = tuple(Preset(name, titles.format(name), config(name)) for name in RHOS)
    return Experiment("e", "E", "here", "m:f", presets, tables)


def draw(figure: Curves | Sweep, *runs: RunRecord, titles: str = "Preset {}") -> FigureView:
    what = experiment(titles=titles)
    return view_figure(figure, what, group_runs(what, runs))


def texts(svg: str) -> list[str]:
    return [e.text or "" for e in ElementTree.fromstring(svg).iter() if e.tag.endswith("text")]


class TestCurves:
    def test_the_mean_and_spread_over_seeds(self):
        groups = group_runs(experiment(), [run("a", 0, points(4.0, 1.0)), run("a", 1, points(8.0, 3.0))])
        line = curve_drawing(CURVES, groups).series[0]
        assert (line.x, line.y) == ((0.0, 10.0), (6.0, 2.0))
        assert line.spread == pytest.approx((math.sqrt(8), math.sqrt(2)))

    def test_only_steps_that_every_seed_logged(self):
        groups = group_runs(experiment(), [run("a", 0, points(4.0, 1.0, 1.0)), run("a", 1, points(8.0, 3.0))])
        assert curve_drawing(CURVES, groups).series[0].x == (0.0, 10.0)

    def test_curves_over_another_one_are_divided_at_the_steps_of_both(self):
        figure = dataclasses.replace(CURVES, over="b")
        runs = [run("a", 0, points(8.0, 6.0, 5.0)), run("a", 1, points(4.0, 2.0, 5.0)), run("b", 0, points(3.0, 2.0))]
        first, second = curve_drawing(figure, group_runs(experiment(), runs)).series
        assert (first.x, first.y) == ((0.0, 10.0), (2.0, 2.0))
        assert first.spread == pytest.approx((math.sqrt(8) / 3, math.sqrt(8) / 2))
        assert second.y == (1.0, 1.0)
        assert curve_drawing(figure, group_runs(experiment(), runs[:2])).series == ()

    def test_curves_over_time_are_not_divided(self):
        with pytest.raises(ValueError, match="leave out times"):
            dataclasses.replace(CURVES, over="b", x="wall_s")

    @pytest.mark.parametrize(("title", "end"), [("Learning, 10% budget", ""), ("Learning", ", 10% budget")])
    def test_the_legend_leaves_out_last_words_that_the_title_has(self, title, end):
        figure = dataclasses.replace(CURVES, title=title)
        runs = [run(name, 0, points(2.0, 1.0)) for name in "ab"]
        svg = draw(figure, *runs, titles="K = {}, rho = 1, 10% budget").svg
        assert svg is not None
        assert {f"K = {name}, rho = 1{end}" for name in "ab"} <= set(texts(svg))

    def test_wall_time_is_averaged_too(self):
        slow = [point | {"wall_s": point["wall_s"] * 3} for point in points(1.0, 1.0)]
        groups = group_runs(experiment(), [run("a", 0, points(1.0, 1.0)), run("a", 1, slow)])
        assert curve_drawing(dataclasses.replace(CURVES, x="wall_s"), groups).series[0].x == (0.0, 1.0)

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"side_by_side": 10}, "1 of 2 runs shared their machine"),
            ({"side_by_side": None}, "1 of 2 runs did not record"),
            ({"device": "cpu: EPYC"}, "several devices"),
            ({"versions": {"torch": "2.11.0"}}, "several torch versions"),
        ],
    )
    def test_times_that_cannot_be_compared_are_not_drawn(self, changes, reason):
        figure = dataclasses.replace(CURVES, x="wall_s")
        runs = [run("a", 0, points(2.0, 1.0)), run("b", 0, points(3.0, 1.0), **changes)]
        view = draw(figure, *runs)
        assert view.svg is None
        assert reason in view.notes[0]
        assert draw(CURVES, *runs).svg, "steps can always be compared"

    def test_times_of_runs_that_had_their_machine_alone_are_drawn(self):
        figure = dataclasses.replace(CURVES, x="wall_s")
        svg = draw(figure, run("a", 0, points(2.0, 1.0)), run("b", 0, points(3.0, 1.0))).svg
        assert "time, seconds" in texts(svg or "")

    def test_lines_without_the_metric_are_skipped(self):
        curve = [{"step": 0, "wall_s": 0.0, "loss": 2.0}, {"step": 5, "wall_s": 1.0, "accuracy": 0.5}]
        groups = group_runs(experiment(), [run("a", 0, curve)])
        assert curve_drawing(CURVES, groups).series[0].y == (2.0,)

    def test_a_diverged_run_is_a_line_of_its_own(self):
        broken = run("a", 1, points(4.0, 90.0), status="diverged")
        lines = curve_drawing(CURVES, group_runs(experiment(), [run("a", 0, points(4.0, 1.0)), broken])).series
        assert [(line.style, line.y) for line in lines] == [("curve", (4.0, 1.0)), ("diverged", (4.0, 90.0))]
        assert len({line.index for line in lines}) == 1

    def test_where_all_diverged_the_legend_says_so(self):
        groups = group_runs(experiment(), [run("a", 0, points(4.0, 90.0), status="diverged")])
        assert curve_drawing(CURVES, groups).series[0].label == "Preset a (diverged)"

    def test_what_is_not_drawn_is_said(self):
        changed = run("a", 0, points(1.0), config=config_json(config("a"), K=2))
        notes = curve_drawing(CURVES, group_runs(experiment(), [run("a"), changed])).notes
        assert notes == (
            "Preset a: no curve that all its runs recorded.",
            "Preset a: 1 run with a changed config not drawn.",
            "Preset b: not run.",
        )

    def test_long_curves_are_thinned_and_keep_their_ends(self):
        groups = group_runs(experiment(), [run("a", 0, points(*map(float, range(5000)), step=1))])
        line = curve_drawing(CURVES, groups).series[0]
        assert len(line.x) == MAX_POINTS
        assert (line.x[0], line.x[-1]) == (0.0, 4999.0)
        assert list(line.x) == sorted(set(line.x))


class TestSweep:
    def test_one_point_per_preset_in_the_order_of_the_field(self):
        runs = [run(name, metrics={"loss": value}) for name, value in (("a", 3.0), ("b", 1.0), ("c", 2.0))]
        line = sweep_drawing(SWEEP, experiment(), group_runs(experiment(), runs)).series[0]
        assert (line.x, line.y) == ((0.03, 0.1, 0.3), (1.0, 2.0, 3.0))

    def test_the_papers_values_come_from_the_tables(self):
        table = Table("t", "T", ("x",), (Row("r", (Cell("b", "loss", Paper(7.0)),)), Row("s", (Cell("a", "loss"),))))
        what = experiment(table)
        lines = sweep_drawing(SWEEP, what, group_runs(what, [run("a")])).series
        assert [(line.style, line.x, line.y) for line in lines] == [
            ("points", (0.3,), (1.0,)),
            ("paper", (0.03,), (7.0,)),
        ]

    def test_lines_of_presets_over_those_of_a_reference_at_the_same_place(self):
        # no reference has b's rho
        figure = dataclasses.replace(SWEEP, labels=("first", "second"), lines=(("a", "b"), ("c",)), over=("c", "a"))
        runs = [run(name, metrics={"loss": value}) for name, value in (("a", 3.0), ("b", 1.0), ("c", 2.0))]
        lines = sweep_drawing(figure, experiment(), group_runs(experiment(), runs)).series
        assert [(line.label, line.x, line.y) for line in lines] == [
            ("first", (0.3,), (1.0,)),
            ("second", (0.1,), (1.0,)),
        ]
        halved = dataclasses.replace(figure, lines=(("a",),), labels=("first",), over=("b",), field="K")
        (line,) = sweep_drawing(halved, experiment(), group_runs(experiment(), runs)).series
        assert (line.x, line.y) == ((8,), (3.0,))
        assert draw(halved, *runs).svg

    def test_values_beyond_the_end_of_the_axis_are_printed_above_it(self):
        figure = dataclasses.replace(SWEEP, most=3.0)
        svg = draw(figure, *(run(name, metrics={"loss": x}) for name, x in (("a", 1.0), ("b", 2.0), ("c", 9.25)))).svg
        assert svg is not None
        assert "↑ 9.25" in texts(svg)
        assert "8" not in texts(svg)

    def test_a_line_counts_its_points_that_were_not_run(self):
        figure = dataclasses.replace(
            SWEEP, labels=("first", "second"), lines=(("a", "b"), ("c",)), over=("a", "b", "c")
        )
        assert draw(figure, run("a"), run("c")).notes == ("first: 1 of 2 points run.",)
        assert "second: none of 1 points run." in draw(figure, run("a")).notes

    def test_presets_that_share_a_position_are_all_drawn(self):
        figure = dataclasses.replace(SWEEP, field="K")
        drawing = sweep_drawing(figure, experiment(), group_runs(experiment(), [run("a"), run("b"), run("c")]))
        assert drawing.series[0].x == (8, 8, 8)

    def test_names_make_a_categorical_axis_in_the_presets_order(self):
        figure = dataclasses.replace(SWEEP, field="method")
        drawing = sweep_drawing(figure, experiment(), group_runs(experiment(), [run("a"), run("c")]))
        assert (drawing.categorical, drawing.series[0].x) == (True, ("split_fg", "split_fg"))

    def test_a_nested_config_goes_by_its_class(self):
        figure = dataclasses.replace(SWEEP, field="step")
        drawing = sweep_drawing(figure, experiment(), group_runs(experiment(), [run("a")]))
        assert drawing.series[0].x == ("Step",)

    def test_diverged_and_missing_presets_are_said(self):
        drawing = sweep_drawing(SWEEP, experiment(), group_runs(experiment(), [run("a", status="diverged"), run("b")]))
        assert drawing.series[0].x == (0.03,)
        assert drawing.notes == ("Preset a: 1 of 1 diverged.", "Preset c: not run.")


class TestSvg:
    def test_nothing_run_nothing_drawn(self):
        assert draw(CURVES).svg is None
        assert draw(SWEEP).svg is None

    @pytest.mark.parametrize("log", [False, True])
    @pytest.mark.parametrize("value", [1.0, 0.0, -3.0, 1e-12, 1e90])
    def test_any_value_can_be_drawn(self, log, value):
        curves = dataclasses.replace(CURVES, log_x=log, log_y=log, references=(("paper", value),))
        assert draw(curves, run("a", 0, points(value, 2.0)), run("a", 1, points(value, 9.0))).svg
        sweep = dataclasses.replace(SWEEP, log_x=log, log_y=log)
        assert draw(sweep, run("a", metrics={"loss": value}), run("a", 1, metrics={"loss": 5.0})).svg

    def test_a_logarithmic_axis_stays_one_and_says_what_it_cannot_show(self):
        figure = dataclasses.replace(CURVES, log_y=True, references=(("chance", 0.0), ("frozen", 5.0)))
        view = draw(figure, run("a", 0, points(0.0, 2.0, -1.0, 2000.0)), run("b", 0, points(3.0, 0.0, 4.0)))
        found = texts(view.svg or "")
        assert {"10", "100", "1,000"} <= set(found), "powers of ten"
        assert "Preset a (2 points not above zero left out)" in found
        assert "Preset b (1 point not above zero left out)" in found
        assert "frozen: 5" in found
        assert not [text for text in found if text.startswith("chance")]
        assert view.notes == ("chance: not above zero, left out.",)

    def test_the_spread_stays_with_its_points(self):
        groups = group_runs(experiment(), [run("a", 0, points(-4.0, 1.0)), run("a", 1, points(-8.0, 3.0))])
        (line,) = for_logarithms(curve_drawing(CURVES, groups), x=False, y=True).series
        assert (line.x, line.y) == ((10.0,), (2.0,))
        assert line.spread == pytest.approx((math.sqrt(2),))

    def test_the_first_step_has_no_place_on_a_logarithmic_axis(self):
        view = draw(dataclasses.replace(CURVES, log_x=True), run("a", 0, points(5.0, 4.0, 3.0)))
        assert "Preset a (1 point not above zero left out)" in texts(view.svg or "")

    def test_a_line_without_any_point_left_is_a_note(self):
        figure = dataclasses.replace(CURVES, log_y=True)
        view = draw(figure, run("a", 0, points(0.0, -1.0)), run("b", 0, points(3.0, 4.0)))
        assert "Preset a: 2 points not above zero left out." in view.notes
        assert draw(figure, run("a", 0, points(0.0, -1.0))).svg is None

    def test_so_is_a_diverged_run_that_the_legend_does_not_name(self):
        figure = dataclasses.replace(CURVES, log_y=True)
        broken = run("a", 1, points(-4.0, 90.0), status="diverged")
        assert "Preset a: 1 point not above zero left out." in draw(figure, run("a", 0, points(4.0)), broken).notes

    def test_nothing_is_left_out_on_linear_axes(self):
        view = draw(CURVES, run("a", 0, points(0.0, -2.0)), run("b", 0, points(1.0)))
        assert {"Preset a", "Preset b"} <= set(texts(view.svg or ""))
        assert view.notes == ()

    def test_every_line_is_named_and_so_are_the_axes(self):
        figure = dataclasses.replace(CURVES, references=(("frozen", 1234.5),))
        svg = draw(figure, run("a", 0, points(2.0, 1.0)), run("b", 0, points(3.0, 2.0))).svg
        assert svg is not None
        assert {"Preset a", "Preset b", "frozen: 1234.5", "training step", "training loss"} <= set(texts(svg))

    def test_words_that_all_labels_begin_with_are_left_out_of_the_legend(self):
        runs = [run("a", 0, points(2.0, 1.0)), run("b", 0, points(3.0, 2.0))]
        assert {"Preset a", "Preset b"} <= set(texts(draw(CURVES, *runs, titles="CIFAR-10: Preset {}").svg or ""))
        alone = texts(draw(CURVES, runs[0], titles="CIFAR-10: Preset {}").svg or "")
        assert "CIFAR-10: Preset a" in alone

    def test_a_sweep_may_say_its_fields_and_metrics_in_words(self):
        plain, worded = (
            set(texts(draw(figure, run("a")).svg or ""))
            for figure in (SWEEP, dataclasses.replace(SWEEP, x_label="step scale", labels=("final loss",)))
        )
        assert {"rho", "training loss"} <= plain
        assert {"step scale", "final loss"} <= worded
        assert not {"rho", "training loss"} & worded

    def test_axes_of_all_shipped_figures_are_labelled_in_words(self):
        figures = [f for e in EXPERIMENTS for f in e.figures if isinstance(f, Curves | Sweep)]
        labels = {label for figure in figures for label in axis_labels(figure)}
        assert labels
        assert [label for label in labels if re.search(r"_|\w[./]\w", label)] == []

    def test_a_method_has_one_colour_and_its_lines_differ_otherwise(self):
        what = Experiment("e", "E", "here", "m:f", tuple(Preset(n, n, config(n)) for n in RHOS))
        lines = [run(n, 0, points(2.0, 1.0)) for n in RHOS]
        view = view_figure(dataclasses.replace(CURVES, presets=tuple(RHOS)), what, group_runs(what, lines))
        strokes = re.findall(r"stroke: var\((--fig-series-\d+)", view.svg or "")
        assert set(strokes) == {"--fig-series-1"}, "all are Split-FG"
        assert len(set(re.findall(r"stroke-dasharray: ([\d., ]+)", view.svg or ""))) >= 2

    @pytest.mark.parametrize(
        ("config", "method"),
        [
            ({"method": {"type": "SplitFGMethod", "K": 4}}, "split_fg"),
            ({"method": {"type": "PureFGMethod"}}, "pure_fg"),
            ({"training": {"method": {"type": "BackpropMethod"}}}, "backprop"),
            ({"method": {"type": "KnnLMMethod"}}, "hopfield"),
            ({"method": "es"}, "evolution"),
            ({"steps": 3}, ""),
        ],
    )
    def test_the_method_of_a_config(self, config, method):
        assert method_of(config) == method

    @pytest.mark.parametrize(
        ("name", "method"),
        [
            ("mib/split_fg-k4-chunk1", "split_fg"),
            ("mib/backprop-both", "backprop"),
            ("ms/fg-k1-chunk1", "pure_fg"),
            ("loss", ""),
            ("frozen", "frozen"),
            ("essence", ""),
        ],
    )
    def test_the_method_of_a_variant(self, name, method):
        assert method_in(name) == method

    def test_every_method_of_the_shipped_curves_has_a_colour(self):
        shown = {(e.name, name) for e in EXPERIMENTS for f in e.figures if isinstance(f, Curves) for name in f.presets}
        methods = {method_of(p.config) for e in EXPERIMENTS for p in e.presets if (e.name, p.name) in shown}
        assert {method for method in methods if colour_of(method) is None} == set()

    @pytest.mark.parametrize(
        "title", ["$x^2$ {} \\frac", "_hidden {}", "日本語 {}", "a < b & c > {} \"'", '#1b62a5 id="{}"']
    )
    def test_labels_are_printed_as_they_are(self, title):
        svg = draw(CURVES, run("a", 0, points(2.0, 1.0)), titles=title).svg
        assert svg is not None
        assert title.format("a") in texts(svg)

    def test_text_cannot_become_markup(self):
        figure = dataclasses.replace(CURVES, title='"><script>alert(1)</script>')
        svg = draw(figure, run("a", 0, points(2.0, 1.0)), titles="<script>alert({})</script>").svg
        assert svg is not None
        assert "<script" not in svg
        assert ElementTree.fromstring(svg).get("aria-label") == figure.title

    def test_the_same_numbers_give_the_same_bytes(self):
        runs = [run("a", 0, points(2.0, 1.0)), run("a", 1, points(2.5, 1.5))]
        assert draw(CURVES, *runs).svg == draw(CURVES, *runs).svg

    def test_no_dates_no_requests_and_no_names_that_two_figures_share(self):
        first = draw(CURVES, run("a", 0, points(2.0, 1.0))).svg
        second = draw(dataclasses.replace(CURVES, key="other"), run("a", 0, points(2.0, 1.0))).svg
        assert first is not None
        assert second is not None
        urls = set(re.findall(r"https?://[^\s\"']+", first))
        assert urls <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
        assert not set(re.findall(r'\bid="([^"]+)"', first)) & set(re.findall(r'\bid="([^"]+)"', second))

    def test_colours_follow_the_page_with_a_fallback(self):
        svg = draw(CURVES, run("a", 0, points(2.0, 1.0))).svg
        assert svg is not None
        assert "stroke: var(--fig-series-1, #" in svg
        bare = re.sub(r"var\([^)]*\)", "", svg)
        assert set(re.findall(r"#[0-9a-f]{6}\b", bare)) <= {"#ffffff", "#000000"}

    def test_the_users_own_matplotlib_settings_neither_matter_nor_change(self):
        import matplotlib

        plain = draw(CURVES, run("a", 0, points(2.0, 1.0))).svg
        with matplotlib.rc_context({"font.size": 30, "axes.labelsize": 30}):
            assert draw(CURVES, run("a", 0, points(2.0, 1.0))).svg == plain
            assert matplotlib.rcParams["font.size"] == 30


class TestMatrices:
    CONFUSION = Confusion("c", "Confusion", ("a", "b"), ("cat", "dog"))
    FILTERS = Filters("f", "Filters", ("a", "b"))

    def test_runs_of_a_preset_are_summed(self):
        runs = [run("a", s, matrices={"confusion": [[1, 2], [3, 4]]}) for s in (0, 1)]
        groups = group_runs(experiment(), runs)
        assert confusions(self.CONFUSION, groups) == {"Preset a": ((2, 4), (6, 8))}

    def test_a_confusion_matrix_names_classes_and_axes(self):
        view = draw(self.CONFUSION, run("a", matrices={"confusion": [[5, 1], [0, 6]]}))
        assert {"cat", "dog", "true class", "assigned class", "Preset a"} <= set(texts(view.svg or ""))
        assert view.notes == ("Preset b: no run recorded it.",)

    def test_filters_before_and_after(self):
        before, after = ([[sign * i for i in range(27)]] * 4 for sign in (1.0, -1.0))
        view = draw(self.FILTERS, run("a", matrices={"filters_before": before, "filters_after": after}))
        assert {"Before training", "Preset a"} <= set(texts(view.svg or ""))

    @pytest.mark.parametrize("matrix", [[], [[]], [[1.0, 2.0]], [[1.0], [2.0, 3.0]], [[0.5] * 26]])
    def test_matrices_of_another_shape_are_skipped(self, matrix):
        names = ("confusion", "filters_before", "filters_after")
        odd = run("a", matrices=dict.fromkeys(names, matrix))
        assert draw(self.CONFUSION, odd).svg is None
        assert draw(self.FILTERS, odd).svg is None

    @pytest.mark.parametrize("figure", [CONFUSION, FILTERS])
    def test_runs_without_a_matrix_are_nothing_to_draw(self, figure):
        view = draw(figure, run("a"))
        assert view.svg is None
        assert view.notes
