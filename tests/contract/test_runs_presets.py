"""Every experiment that ships: its presets can be written down and read back, and its tables and figures name them."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from splitfg.errors import DataError
from splitfg_lab.experiments import EXPERIMENTS, Cell, Curves, Experiment, Preset, Sweep
from splitfg_lab.runs import RunError, RunFolder, execute, from_json, override, to_json
from splitfg_lab.runs.config import flatten
from splitfg_lab.runs.results import read_results

SHIPPED = [e for e in EXPERIMENTS if e.runner.startswith("splitfg_lab.")]
ALL = [pytest.param(e, p, id=f"{e.name}/{p.name}") for e in SHIPPED for p in e.presets]
EACH = [pytest.param(e, id=e.name) for e in SHIPPED]


def stepped() -> list[Any]:
    """Presets that take two steps: one of each kind, since presets that differ in numbers alone run the same code.

    Of a table other than the smallest one, the first preset alone.
    """
    found = {}
    for experiment in SHIPPED:
        for preset in experiment.presets:
            kind = {k: v for k, v in flatten(to_json(preset.config)) if isinstance(v, str | bool | None)}
            if experiment.name.startswith("tabular") and kind.get("dataset") != "california":
                kind = {"dataset": kind.get("dataset")}
            param = pytest.param(experiment, preset, id=f"{experiment.name}/{preset.name}")
            found.setdefault((experiment.name, str(sorted(kind.items(), key=str))), param)
    return list(found.values())


@pytest.mark.parametrize(("experiment", "preset"), ALL)
def test_a_preset_survives_being_written_down(experiment: Experiment, preset: Preset) -> None:
    assert from_json(type(preset.config), to_json(preset.config)) == preset.config
    assert preset.seeds
    assert preset.title


@pytest.mark.parametrize("experiment", EACH)
def test_recorded_runs_lack_no_field_of_their_presets(experiment: Experiment) -> None:
    """A field that is new is listed in ``earlier``; otherwise tables show recorded runs as those of other configs."""
    presets = {preset.name: preset for preset in experiment.presets}
    runs = read_results(Path(__file__).parents[2] / "results" / f"{experiment.name}.json")
    lacking = {
        change
        for run in runs
        if run.report.preset in presets
        for change in experiment.changes(presets[run.report.preset], run.report.config)
        if "=absent" in change
    }
    # the demo's first runs named the rule and the probe that are now the default
    known = {"method.route.rule=absent (preset: None)", "method.probe=absent (preset: None)"}
    assert lacking <= (known if experiment.name == "demo" else set())


@pytest.mark.parametrize("experiment", EACH)
def test_tables_and_figures_name_presets_that_exist(experiment: Experiment) -> None:
    names = {preset.name for preset in experiment.presets}
    cells = [c for table in experiment.tables for row in table.rows for c in row.cells if isinstance(c, Cell)]
    figures = [name for figure in experiment.figures for name in figure.presets]
    assert set(figures) <= names
    elsewhere = {f"{e.name}/{p.name}" for e in EXPERIMENTS for p in e.presets}
    assert {cell.preset for cell in cells} <= names | elsewhere
    for table in experiment.tables:
        assert all(len(row.cells) == len(table.columns) for row in table.rows)
    for figure in experiment.figures:
        if isinstance(figure, Sweep):
            for name in figure.presets:
                assert isinstance(field(to_json(experiment.preset(name).config), figure.field), int | float)


@pytest.mark.parametrize("experiment", EACH)
def test_step_times_of_figures_are_recorded(experiment: Experiment) -> None:
    for figure in experiment.figures:
        if isinstance(figure, Curves) and figure.step_ms:
            assert {name for name, _ in figure.step_ms} <= set(figure.presets)
            for _, cell in figure.step_ms:
                other, _, preset = cell.preset.partition("/")
                runs = read_results(Path(__file__).parents[2] / "results" / f"{other}.json")
                assert [run for run in runs if run.report.preset == preset and cell.metric in run.report.metrics]
                assert preset in {p.name for e in EXPERIMENTS if e.name == other for p in e.presets}


@pytest.mark.parametrize("experiment", EACH)
def test_an_experiment_has_a_protocol(experiment: Experiment) -> None:
    package = importlib.import_module(experiment.runner.partition(":")[0].rpartition(".")[0])
    assert package.__file__ is not None
    assert (Path(package.__file__).parent / "README.md").stat().st_size > 200


@pytest.fixture
def _real_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real data lies beside the checkout, or where SPLITFG_DATA says."""
    beside = Path(__file__).parents[3] / "shared" / "data"
    if "SPLITFG_DATA" not in os.environ and beside.is_dir():
        monkeypatch.setenv("SPLITFG_DATA", str(beside))


@pytest.mark.usefixtures("_real_data")
@pytest.mark.parametrize(("experiment", "preset"), stepped())
def test_a_preset_takes_two_steps(experiment: Experiment, preset: Preset, tmp_path: Path) -> None:
    module, _, name = experiment.runner.partition(":")
    runner = getattr(importlib.import_module(module), name)
    config = override(preset.config, experiment.smoke)
    seed = preset.seeds[0]
    folder = RunFolder.of(tmp_path, experiment.name, preset.name, seed)
    folder.prepare(experiment.name, preset.name, seed, config)
    try:
        report = execute(folder, runner, config, device="cpu", emit=lambda event: None)
    except DataError as error:
        pytest.skip(f"its data is not here: {error}")
    except RunError as error:
        if "only be measured on a GPU" not in str(error):
            raise
        pytest.skip(str(error))
    assert report.status == "done", report.message
    assert report.trunk_backward is not None
    assert folder.has_checkpoint == experiment.resumes(preset), "the command line says so beforehand"
    if "dataset" in to_json(config) and config.dataset != "synthetic":
        assert list(report.data_digests) == [config.dataset]
    wanted = {c.metric for t in experiment.tables for r in t.rows for c in r.cells if isinstance(c, Cell)}
    assert set(report.metrics) & wanted or not wanted


def test_the_registry_needs_no_torch() -> None:
    code = "import sys; from splitfg_lab.experiments import EXPERIMENTS; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env=_environment())


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def field(config: dict[str, Any], path: str) -> Any:
    for name in path.split("."):
        config = config[name]
    return config
