"""Figures over time, from step times that another experiment measured."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from report_samples import Config, config_json, report_json, write_run
from test_report_figures import CURVES, config, experiment, points, run, texts

from splitfg_lab.experiments.spec import Cell, Experiment, Preset
from splitfg_lab.report import write_figures
from splitfg_lab.report._figures import FigureView, view_figure
from splitfg_lab.report._groups import PresetRuns, group_runs
from splitfg_lab.report._series import curve_drawing
from splitfg_lab.runs.config import from_json
from splitfg_lab.runs.record import RunReport
from splitfg_lab.runs.results import RunRecord


class TestStepTimes:
    """Curves over time from step times of another experiment."""

    TIMED = dataclasses.replace(
        CURVES, step_ms=(("a", Cell("cost/compiled", "ms/a")), ("b", Cell("cost/compiled", "ms/other")))
    )
    COST = Experiment("cost", "Cost", "here", "m:f", (Preset("compiled", "Times", Config()),))

    def measured(self, seed: int = 0, **changes: Any) -> RunRecord:
        fields = {"metrics": {"ms/a": 2.5, "ms/other": 40.0}} | changes
        return RunRecord(from_json(RunReport, report_json("cost", "compiled", seed, **fields)), (), "runs")

    def groups(self, runs: list[RunRecord], *times: RunRecord) -> dict[str, PresetRuns]:
        cost = {f"cost/{name}": group for name, group in group_runs(self.COST, times).items()}
        return {**cost, **group_runs(experiment(), runs)}

    def view(self, runs: list[RunRecord], *times: RunRecord) -> FigureView:
        return view_figure(self.TIMED, experiment(), self.groups(runs, *times))

    def test_positions_are_steps_times_the_measured_step(self):
        runs = [*(run("a", seed, points(4.0, 1.0, 1.0, step=30)) for seed in range(3)), run("b", 0, points(2.0, 1.0))]
        first, second = curve_drawing(self.TIMED, self.groups(runs, self.measured())).series
        assert (first.x, second.x) == ((0.0, 0.075, 0.15), (0.0, 0.4))
        assert (first.y, second.y) == ((4.0, 1.0, 1.0), (2.0, 1.0))

    def test_so_are_those_of_diverged_runs(self):
        runs = [run("a", 0, points(4.0, 90.0), status="diverged")]
        (line,) = curve_drawing(self.TIMED, self.groups(runs, self.measured())).series
        assert (line.style, line.x) == ("diverged", (0.0, 0.025))

    def test_runs_that_shared_their_machine_are_drawn(self):
        runs = [run("a", 0, points(4.0, 1.0), side_by_side=10), run("b", 0, points(2.0, 1.0), device="cpu: EPYC")]
        view = self.view(runs, self.measured())
        assert {"Preset a", "Preset b", "time, seconds (steps times measured step time)"} <= set(texts(view.svg or ""))
        assert view.notes == (
            "Time is the number of steps times the step time in cost/compiled (cuda: NVIDIA H200, one run at a time,"
            " torch 2.13.0, 2025-03-01). Evaluation and compilation are not counted.",
        )

    def test_the_note_tells_if_the_measurement_was_not_alone(self):
        note = self.view([run("a", 0, points(4.0, 1.0))], self.measured(side_by_side=3)).notes[0]
        assert "shared by 3 runs" in note

    def test_presets_whose_step_was_not_timed_are_left_out(self):
        runs = [run("a", 0, points(4.0, 1.0)), run("b", 0, points(2.0, 1.0))]
        view = self.view(runs, self.measured(metrics={"ms/a": 2.5}))
        assert "Preset a" in texts(view.svg or "")
        assert "Preset b" not in texts(view.svg or "")
        assert view.notes[1:] == ("Preset b: its step was not timed.",)

    def test_a_preset_without_runs_is_not_run(self):
        assert self.view([run("a", 0, points(4.0))], self.measured()).notes[1:] == ("Preset b: not run.",)

    def test_without_the_other_experiment_nothing_is_drawn(self):
        runs = [run("a", 0, points(4.0, 1.0))]
        view = view_figure(self.TIMED, experiment(), group_runs(experiment(), runs))
        assert view.svg is None
        assert view.notes == ("Times cannot be compared: cost/compiled is not part of this report.",)
        unrun = self.view(runs)
        assert unrun.svg is None
        assert unrun.notes == ("Times cannot be compared: cost/compiled was not run.",)

    def test_measurements_on_several_devices_are_not_mixed(self):
        times = (self.measured(), self.measured(1, device="cpu: EPYC"))
        view = self.view([run("a", 0, points(4.0, 1.0))], *times)
        assert view.svg is None
        assert "several devices" in view.notes[0]

    def test_a_report_on_one_experiment_reads_the_times_of_the_other(self, tmp_path):
        write_run(tmp_path, report_json("e", "a", config=config_json(config("a"))), points(4.0, 1.0))
        write_run(tmp_path, report_json("cost", "compiled", metrics={"ms/a": 2.5}))
        what = dataclasses.replace(experiment(), figures=(self.TIMED,))
        both = write_figures(tmp_path, tmp_path / "none", tmp_path / "out", "e", (what, self.COST))
        assert [path.name for path in both] == ["curves.svg"]
        assert write_figures(tmp_path, tmp_path / "none", tmp_path / "out", "e", (what,)) == []

    def test_step_times_and_recorded_times_exclude_each_other(self):
        with pytest.raises(ValueError, match="leave out x='wall_s'"):
            dataclasses.replace(self.TIMED, x="wall_s")
