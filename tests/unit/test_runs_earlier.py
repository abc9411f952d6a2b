"""Runs from before a field was there: what is run, recorded, listed and skipped is the same everywhere."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "plugin"))
sys.path.insert(0, str(Path(__file__).parent))
from test_runs_folder import make_report
from tiny import EXPERIMENT, TinyConfig

from splitfg_lab.commands import worker
from splitfg_lab.commands._standing import standings
from splitfg_lab.commands._targets import Plan
from splitfg_lab.experiments import Experiment
from splitfg_lab.runs import RunError, RunFolder, from_json, to_json

PRESET = EXPERIMENT.preset("adam")
OTHERWISE = replace(EXPERIMENT, earlier=(("noise", 0.5), ("optimizer.lr", 0.02)))
"""Before there were these fields, noise and rate were others than the preset's."""


def without(data: dict[str, Any], *names: str) -> dict[str, Any]:
    """A config as it was before there were some fields."""
    optimizer = {k: v for k, v in data["optimizer"].items() if f"optimizer.{k}" not in names}
    return {k: v for k, v in data.items() if k not in names} | {"optimizer": optimizer}


@pytest.fixture
def old(tmp_path: Path) -> Callable[..., RunFolder]:
    """Makes a folder whose config is from before there were some fields; finished then, if asked for."""

    def make(*names: str, finished: bool = False) -> RunFolder:
        folder = RunFolder.of(tmp_path / "runs", "tiny", "adam", 0)
        folder.prepare("tiny", "adam", 0, TinyConfig())
        path = folder.path / "config.json"
        identity = json.loads(path.read_text())
        config = without(identity["config"], *names)
        path.write_text(json.dumps(identity | {"config": config}))
        if finished:
            folder.finish(make_report(config=config))
        return folder

    return make


def run(folder: RunFolder, experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "find_preset", lambda *_: (experiment, PRESET))
    assert worker._work(folder, "cpu", lambda event: None, None) == 0


def is_done(root: Path, experiment: Experiment) -> bool:
    """Whether ``splitfg ls`` counts the seed as done."""
    (found,), problems = standings([(experiment, PRESET)], root / "runs", root / "results")
    assert not problems
    return found.done == (0,)


def is_taken(folder: RunFolder, experiment: Experiment) -> bool:
    """Whether ``splitfg run`` takes the folder for that of the preset."""
    try:
        Plan(experiment, PRESET, PRESET.config, 0).prepare(folder)
    except RunError:
        return False
    return True


def test_a_run_records_all_of_its_config(
    tmp_path: Path, old: Callable[..., RunFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = old("noise", "optimizer.lr")
    assert is_taken(folder, EXPERIMENT)
    run(folder, EXPERIMENT, monkeypatch)
    assert folder.report().config == to_json(TinyConfig())
    assert is_taken(folder, EXPERIMENT)
    assert is_done(tmp_path, EXPERIMENT)


def test_a_run_goes_on_with_what_a_field_amounted_to_when_it_was_begun(
    tmp_path: Path, old: Callable[..., RunFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = old("noise", "optimizer.lr")
    assert not is_taken(folder, OTHERWISE)
    run(folder, OTHERWISE, monkeypatch)
    ran = from_json(TinyConfig, folder.report().config)
    assert (ran.noise, ran.optimizer.lr) == (0.5, 0.02)
    assert not is_taken(folder, OTHERWISE)
    assert not is_done(tmp_path, OTHERWISE)


@pytest.mark.parametrize(
    ("experiment", "same"),
    [
        (EXPERIMENT, False),
        (OTHERWISE, False),
        (replace(EXPERIMENT, earlier=(("noise", 0.1),)), True),
        (replace(EXPERIMENT, immaterial=("noise",)), True),
    ],
)
def test_a_finished_run_from_before_a_field_is_the_preset_for_all_or_for_nobody(
    tmp_path: Path, old: Callable[..., RunFolder], experiment: Experiment, same: bool
) -> None:
    folder = old("noise", finished=True)
    assert (is_taken(folder, experiment), is_done(tmp_path, experiment)) == (same, same)


def test_a_finished_run_with_a_field_that_went_is_taken_where_that_is_immaterial(
    tmp_path: Path, old: Callable[..., RunFolder]
) -> None:
    folder = old()
    folder.finish(make_report(config=to_json(TinyConfig()) | {"gone": 1}))
    for experiment, same in ((EXPERIMENT, False), (replace(EXPERIMENT, immaterial=("gone",)), True)):
        assert (is_taken(folder, experiment), is_done(tmp_path, experiment)) == (same, same)


def test_a_finished_run_with_an_immaterial_field_set_otherwise_is_not_passed_off_as_what_was_asked_for(
    old: Callable[..., RunFolder],
) -> None:
    folder = old()
    folder.finish(make_report(config=to_json(TinyConfig(noise=0.5))))
    with pytest.raises(RunError, match=r"noise=0.5 \(preset: 0.1\)\nDelete or move that folder"):
        Plan(replace(EXPERIMENT, immaterial=("noise",)), PRESET, PRESET.config, 0).prepare(folder)


def test_filling_in_changes_nothing_that_is_there() -> None:
    recorded = without(to_json(TinyConfig()), "noise", "optimizer.lr")
    before = json.dumps(recorded)
    filled = OTHERWISE.completed(recorded)
    assert json.dumps(recorded) == before
    assert filled == to_json(TinyConfig()) | {"noise": 0.5, "optimizer": recorded["optimizer"] | {"lr": 0.02}}
    assert OTHERWISE.completed(to_json(TinyConfig())) == to_json(TinyConfig())
    assert OTHERWISE.completed({}) == {"noise": 0.5}


def test_a_field_may_belong_to_objects_of_one_type_alone() -> None:
    experiment = replace(EXPERIMENT, earlier=(("method:Pull.skips", False),))
    assert experiment.completed({"method": {"type": "Pull"}}) == {"method": {"type": "Pull", "skips": False}}
    for other in ({"method": {"type": "Frozen"}}, {"method": {"type": "Pull", "skips": True}}, {}):
        assert experiment.completed(other) == other
