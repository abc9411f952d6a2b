"""Results that travel: merged by preset, seed and config, in a stable order, small, and read with run folders."""

from __future__ import annotations

import json
import random
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "plugin"))
sys.path.insert(0, str(Path(__file__).parent))
from test_runs_folder import make_report
from tiny import TinyConfig

from splitfg_lab.experiments import Experiment, Preset
from splitfg_lab.experiments.spec import identity_in
from splitfg_lab.runs import RunError, RunFolder, RunRecord, read_records, results, to_json
from splitfg_lab.runs.results import add_records, add_results, by_config, collect, read_results, thin


def finished(root: Path, seed: int = 0, variant: str = "adam", **changes: Any) -> RunFolder:
    config = changes.pop("config", TinyConfig())
    folder = RunFolder.of(root, "tiny", variant, seed)
    folder.prepare("tiny", "adam", seed, config)
    folder.metrics_path.write_text('{"step": 1, "wall_s": 0.5, "loss": 0.123456789}\n')
    folder.finish(make_report(seed=seed, config=to_json(config), **changes))
    return folder


def test_results_files_do_not_depend_on_the_order_of_adding(tmp_path: Path) -> None:
    folders = [finished(tmp_path / "runs", seed) for seed in (0, 1, 2, 10)]
    folders.append(finished(tmp_path / "runs", 0, "adam+steps=5", config=TinyConfig(steps=5)))
    written = []
    for place in ("a", "b"):
        random.Random(place).shuffle(folders)
        for folder in folders:
            add_results([folder], tmp_path / place)
        written.append((tmp_path / place / "tiny.json").read_bytes())
    assert written[0] == written[1]
    file = json.loads(written[0])
    assert (file["schema"], file["experiment"]) == (2, "tiny")
    assert [run["seed"] for run in file["runs"]] == [0, 0, 1, 2, 10]
    assert file["runs"][-1]["curve"]["loss"] == [0.123457]


def test_a_run_made_again_replaces_what_it_recorded(tmp_path: Path) -> None:
    add_results([finished(tmp_path / "old", metrics={"error": 1.0})], tmp_path / "results")
    add_results([finished(tmp_path / "new", metrics={"error": 2.0})], tmp_path / "results")
    assert [run.report.metrics for run in read_results(tmp_path / "results" / "tiny.json")] == [{"error": 2.0}]


def test_of_two_runs_of_one_config_the_one_that_finished_last_is_kept(tmp_path: Path) -> None:
    new = finished(tmp_path / "new", metrics={"error": 2.0}, finished="2026-02-01T00:00:00+00:00")
    old = finished(tmp_path / "old", metrics={"error": 1.0}, config=TinyConfig(noise=0.1))
    for folder in (new, old):
        add_results([folder], tmp_path / "results")
    assert errors(read_results(tmp_path / "results" / "tiny.json")) == [2.0]


def test_a_config_is_the_same_however_its_numbers_are_written() -> None:
    whole, written = ({"pause_s": pause, "betas": [pause, {"a": pause}]} for pause in (1, 1.0))
    assert by_config(make_report(config=whole)) == by_config(make_report(config=written))
    assert by_config(make_report(config={"fail": True})) != by_config(make_report(config={"fail": 1}))


def errors(runs: Iterable[RunRecord]) -> list[float]:
    return [run.report.metrics["error"] for run in runs]


class TestImmaterialFields:
    """``noise`` is one here: runs that differ in it stand for the same number."""

    preset = Preset("adam", "with Adam", TinyConfig())
    experiment = Experiment("tiny", "", "", "m:f", (preset,), immaterial=("noise", "gone"))

    def shown(self, tmp_path: Path) -> list[float]:
        return errors(read_records(tmp_path / "runs", tmp_path / "results", identity_in([self.experiment])).runs)

    def add(self, tmp_path: Path, error: float, day: int, **config: Any) -> None:
        changes = {"metrics": {"error": error}, "finished": f"2026-01-{day:02}T00:00:00+00:00"}
        report = make_report(config=to_json(TinyConfig()) | config, **changes)
        add_records([RunRecord(report, (), "")], tmp_path / "results")

    def test_all_of_them_are_kept_and_the_preset_is_shown_by_its_own(self, tmp_path: Path) -> None:
        for day, noise in enumerate((0.1, 0.5, 0.7), start=1):
            self.add(tmp_path, noise, day, noise=noise)
        assert sorted(errors(read_results(tmp_path / "results" / "tiny.json"))) == [0.1, 0.5, 0.7]
        assert self.shown(tmp_path) == [0.1]

    def test_a_run_folder_does_not_stand_before_a_recorded_run_that_is_closer(self, tmp_path: Path) -> None:
        self.add(tmp_path, 0.1, 1)
        finished(tmp_path / "runs", config=TinyConfig(noise=0.5), variant="adam+noise=0.5", metrics={"error": 0.5})
        assert self.shown(tmp_path) == [0.1]

    @pytest.mark.parametrize("days", [(2, 3), (3, 2)])
    def test_without_one_of_its_own_the_last_of_the_others_stands_for_it(
        self, tmp_path: Path, days: tuple[int, int]
    ) -> None:
        for day, noise in zip(days, (0.5, 0.7), strict=True):
            self.add(tmp_path, noise, day, noise=noise)
        assert self.shown(tmp_path) == [0.7 if days[1] == 3 else 0.5]

    def test_a_field_that_went_is_closer_than_one_that_was_set(self, tmp_path: Path) -> None:
        self.add(tmp_path, 1.0, 1, gone=3)
        self.add(tmp_path, 2.0, 2, noise=0.5)
        assert self.shown(tmp_path) == [1.0]
        self.add(tmp_path, 3.0, 1)
        assert self.shown(tmp_path) == [3.0]

    def test_what_is_overridden_is_shown_beside_it(self, tmp_path: Path) -> None:
        for number, config in enumerate(({}, {"steps": 5}, {"steps": 5, "noise": 0.5}), start=1):
            self.add(tmp_path, float(number), number, **config)
        assert sorted(self.shown(tmp_path)) == [1.0, 2.0]


def test_results_from_another_machine_are_folded_in(tmp_path: Path) -> None:
    add_results([finished(tmp_path / "there", seed, metrics={"error": 2.0}) for seed in (0, 1)], tmp_path / "theirs")
    add_results([finished(tmp_path / "here", metrics={"error": 1.0})], tmp_path / "ours")
    add_results([], tmp_path / "ours", files=[tmp_path / "theirs" / "tiny.json"])
    found = read_results(tmp_path / "ours" / "tiny.json")
    assert [(run.report.seed, run.report.metrics, len(run.curve)) for run in found] == [
        (0, {"error": 2.0}, 1),
        (1, {"error": 2.0}, 1),
    ]


def test_a_damaged_results_file_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "results" / "tiny.json"
    path.parent.mkdir()
    path.write_text('{"schema": 1, "experiment": "tiny", "runs": [{"seed": "x"}]}')
    before = path.read_bytes()
    with pytest.raises(RunError, match=r"runs\[0\].seed: expected int"):
        add_results([finished(tmp_path / "runs")], path.parent)
    assert path.read_bytes() == before


def test_runs_added_at_the_same_time_are_all_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading waits until all have begun, or for a moment: without a lock, all would read the same file."""
    folders = [finished(tmp_path / "runs", seed) for seed in range(4)]
    begun, read = threading.Barrier(len(folders)), results._read_own

    def read_slowly(path: Path) -> list[RunRecord]:
        found = read(path)
        with suppress(threading.BrokenBarrierError):
            begun.wait(0.2)
        return found

    monkeypatch.setattr(results, "_read_own", read_slowly)
    with ThreadPoolExecutor(len(folders)) as pool:
        for job in [pool.submit(add_results, [folder], tmp_path / "results") for folder in folders]:
            job.result()
    assert [run.report.seed for run in read_results(tmp_path / "results" / "tiny.json")] == [0, 1, 2, 3]


def rewritten(path: Path, **changes: Any) -> bytes:
    """A results file in which every run and the file itself say something else."""
    data = json.loads(path.read_bytes())
    for part in (data, *data["runs"]):
        part.update({name: value for name, value in changes.items() if name in part})
    return json.dumps(data).encode()


def test_a_backup_beside_a_results_file_does_not_take_its_place(tmp_path: Path) -> None:
    place = tmp_path / "results"
    (path,) = add_results([finished(tmp_path / "old", metrics={"error": 1.0})], place)
    backup = place / "tiny.old.json"
    backup.write_bytes(rewritten(path, metrics={"error": 2.0}, finished="2027-01-01T00:00:00+00:00"))
    records = read_records(tmp_path / "none", place)
    assert errors(records.runs) == [1.0]
    (problem,) = records.problems
    assert problem.path == str(backup)
    assert "which belong in tiny.json: skipped" in problem.reason
    add_results([], place, files=[backup])  # as the message says
    assert errors(read_results(path)) == [2.0]


def test_a_results_file_under_the_name_of_another_is_neither_read_nor_written_over(tmp_path: Path) -> None:
    (path,) = add_results([finished(tmp_path / "old")], tmp_path / "results")
    path.write_bytes(rewritten(path, experiment="other"))
    before = path.read_bytes()
    assert read_records(tmp_path / "none", path.parent).runs == ()
    with pytest.raises(RunError, match=r"belong in other\.json"):
        add_results([finished(tmp_path / "new")], path.parent)
    assert path.read_bytes() == before


def test_a_results_file_with_runs_of_another_experiment_is_a_problem(tmp_path: Path) -> None:
    (path,) = add_results([finished(tmp_path / "old")], tmp_path / "results")
    data = json.loads(path.read_bytes())
    data["runs"][0]["experiment"] = "other"
    path.write_text(json.dumps(data))
    with pytest.raises(RunError, match="results file of 'tiny' holds runs of other"):
        read_results(path)
    records = read_records(tmp_path / "none", path.parent)
    assert (records.runs, len(records.problems)) == ((), 1)


@pytest.mark.parametrize("name", ["../escaped", "/tmp/escaped", "a/b", ".hidden", "", "..", "a+b", "a\n"])
@pytest.mark.parametrize("field", ["experiment", "preset"])
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, field: str, name: str) -> None:
    folder = finished(tmp_path / "runs")
    (path,) = add_results([folder], tmp_path / "results")
    path.write_bytes(rewritten(path, **{field: name}))
    with pytest.raises(RunError, match=rf"runs\[0\]: {field}: '.*' is not a plain name"):
        read_results(path)
    report = folder.path / "report.json"
    report.write_text(json.dumps(json.loads(report.read_text()) | {field: name}))
    with pytest.raises(RunError, match=f"{field}: '.*' is not a plain name"):
        folder.report()


def test_what_cannot_be_read_does_not_keep_the_rest_from_being_added(tmp_path: Path) -> None:
    folders = [finished(tmp_path / "runs", seed) for seed in (0, 1)]
    (folders[0].path / "report.json").unlink()
    (tmp_path / "broken.json").write_text("{")
    records, problems = collect(folders, [tmp_path / "broken.json"])
    assert {problem.path for problem in problems} == {str(folders[0].path), str(tmp_path / "broken.json")}
    (path,) = add_records(records, tmp_path / "results")
    assert [run.report.seed for run in read_results(path)] == [1]


def test_a_place_for_results_that_cannot_be_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"cannot make the folder .*file/results"):
        add_results([finished(tmp_path / "runs")], tmp_path / "file" / "results")


def test_run_folders_win_over_recorded_results(tmp_path: Path) -> None:
    add_results([finished(tmp_path / "old", metrics={"error": 1.0})], tmp_path / "results")
    add_results([finished(tmp_path / "old", 1)], tmp_path / "results")
    finished(tmp_path / "runs", metrics={"error": 2.0})
    RunFolder.of(tmp_path / "runs", "tiny", "adam", 7).prepare("tiny", "adam", 7, TinyConfig())
    broken = finished(tmp_path / "runs", 8)
    (broken.path / "report.json").write_text("{}")
    records = read_records(tmp_path / "runs", tmp_path / "results")
    assert [(r.report.seed, r.report.metrics["error"], r.source) for r in records.runs] == [
        (0, 2.0, "run folders"),
        (1, 0.5, "results/tiny.json"),
    ]
    assert records.unfinished == ("tiny/adam/seed7",)
    assert [problem.path for problem in records.problems] == [str(broken.path)]


def test_nothing_there_is_nothing_found(tmp_path: Path) -> None:
    records = read_records(tmp_path / "a", tmp_path / "b")
    assert (records.runs, records.unfinished, records.problems) == ((), (), ())


@pytest.mark.parametrize("losses", [1, 150, 5000])
@pytest.mark.parametrize("evaluations", [0, 3, 400])
def test_thin_curves_keep_their_ends_and_their_rare_points(losses: int, evaluations: int) -> None:
    curve = [{"step": float(i), "loss": i / 3} for i in range(losses)]
    curve += [{"step": float(i), "error": 1.0} for i in range(evaluations)]
    curve.sort(key=lambda point: point["step"])
    thinned = thin(curve)
    assert len(thinned) <= 200
    for metric, count in (("loss", losses), ("error", evaluations)):
        steps = [point["step"] for point in thinned if metric in point]
        assert steps == sorted(set(steps))
        assert len(steps) >= min(count, 100)
        if count:
            assert (steps[0], steps[-1]) == (0, count - 1)


def test_short_curves_are_kept_as_they_are() -> None:
    curve = [{"step": i, "loss": 0.5} for i in range(200)]
    assert list(thin(curve)) == curve


def test_curves_by_points_are_read_as_those_by_columns(tmp_path):
    """Files of earlier versions hold a curve point by point."""
    points = [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.4, "accuracy": 90.0}]
    columns = {"step": [1, 2], "loss": [0.5, 0.4], "accuracy": [None, 90.0]}
    recorded = {"schema": 1, "experiment": "tiny"}
    for name, curve in (("points", points), ("columns", columns)):
        run = to_json(make_report()) | {"curve": curve}
        (tmp_path / f"{name}.json").write_text(json.dumps({**recorded, "runs": [run]}), encoding="utf-8")
    by_points, by_columns = (read_results(tmp_path / f"{name}.json")[0].curve for name in ("points", "columns"))
    assert by_points == by_columns == tuple(points)
