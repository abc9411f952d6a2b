"""Run folders: what is run is fixed, what is finished is final, and what cannot be read is said clearly."""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

sys.path.insert(0, str(Path(__file__).parents[1] / "plugin"))
from tiny import Sgd, TinyConfig

from splitfg_lab.files import replacing
from splitfg_lab.runs import (
    ConfigError,
    RunContext,
    RunError,
    RunFolder,
    RunReport,
    differences,
    find_folders,
    load_checkpoint,
    override,
    read_metrics,
    to_json,
)
from splitfg_lab.runs._metrics import MetricsWriter
from splitfg_lab.runs.checkpoint import Checkpoint
from splitfg_lab.runs.folder import variant_name
from splitfg_lab.runs.results import add_results, read_results
from splitfg_lab.runs.storage import write_atomic, write_json


def make_report(**changes: Any) -> RunReport:
    report = RunReport(
        experiment="tiny",
        preset="adam",
        seed=0,
        status="done",
        metrics={"error": 0.5},
        versions={"python": "3.12"},
        git=None,
        git_dirty=None,
        device="cpu",
        threads=1,
        started="2026-01-01T00:00:00+00:00",
        finished="2026-01-01T00:00:01+00:00",
        wall_s=1.0,
        steps=10,
        step_ms=None,
        peak_memory_mib=1.0,
        memory_kind="resident set of the process",
        jvps_per_step=None,
        trunk_backward=None,
        config=to_json(TinyConfig()),
    )
    return replace(report, **changes)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder.of(tmp_path / "runs", "tiny", "adam", 0)
    folder.prepare("tiny", "adam", 0, TinyConfig())
    return folder


def test_a_folder_lives_where_its_name_says(tmp_path: Path, folder: RunFolder) -> None:
    assert folder.path == tmp_path / "runs" / "tiny" / "adam" / "seed0"
    assert folder.name == "tiny/adam/seed0"
    assert find_folders(tmp_path / "runs") == [folder]
    assert json.loads((folder.path / "config.json").read_text()) == {
        "schema": 1,
        "experiment": "tiny",
        "preset": "adam",
        "seed": 0,
        "config": to_json(TinyConfig()),
    }


def test_status_follows_the_run(tmp_path: Path, folder: RunFolder) -> None:
    assert RunFolder(tmp_path / "nowhere").status() == "absent"
    assert folder.status() == "unfinished"
    folder.finish(make_report(status="diverged", message="loss is nan"))
    assert folder.status() == "diverged"
    assert folder.report().message == "loss is nan"


def test_the_same_config_can_be_prepared_again(folder: RunFolder) -> None:
    before = (folder.path / "config.json").stat().st_mtime_ns
    folder.prepare("tiny", "adam", 0, TinyConfig())
    assert (folder.path / "config.json").stat().st_mtime_ns == before


def test_a_changed_config_is_refused_with_the_difference(folder: RunFolder) -> None:
    with pytest.raises(RunError) as error:
        folder.prepare("tiny", "adam", 0, TinyConfig(noise=0.5, optimizer=Sgd()))
    for part in ("noise: 0.1 -> 0.5", 'optimizer.type: "Adam" -> "Sgd"', "--runs"):
        assert part in str(error.value)


def test_another_run_in_the_folder_is_refused(folder: RunFolder) -> None:
    with pytest.raises(RunError, match="holds tiny/adam/seed0"):
        folder.prepare("tiny", "adam", 1, TinyConfig())


def test_a_field_with_a_default_can_be_added_later(folder: RunFolder) -> None:
    path = folder.path / "config.json"
    data = json.loads(path.read_text())
    del data["config"]["noise"]
    path.write_text(json.dumps(data))
    folder.prepare("tiny", "adam", 0, TinyConfig())


def test_an_unknown_field_in_the_folder_is_an_error(folder: RunFolder) -> None:
    path = folder.path / "config.json"
    data = json.loads(path.read_text())
    data["config"]["nosie"] = 1
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match="did you mean noise"):
        folder.prepare("tiny", "adam", 0, TinyConfig())


def test_a_finished_run_is_never_edited(folder: RunFolder) -> None:
    folder.finish(make_report())
    before = {path.name: path.read_bytes() for path in folder.path.iterdir()}
    with pytest.raises(RunError, match="files are final"):
        folder.finish(make_report(metrics={"error": 0.0}))
    assert {path.name: path.read_bytes() for path in folder.path.iterdir()} == before


def test_one_process_at_a_time(folder: RunFolder) -> None:
    with folder.locked(), pytest.raises(RunError, match="another process"), RunFolder(folder.path).locked():
        pass
    with folder.locked():
        pass


def test_leftovers_of_a_killed_process_are_cleared_away(folder: RunFolder) -> None:
    (folder.path / ".checkpoint.safetensors.1234.tmp").write_bytes(b"half")
    with folder.locked():
        assert list(folder.path.glob(".*.tmp")) == []


def test_variants_are_named_by_what_they_change() -> None:
    def name(*overrides: str) -> str:
        config = TinyConfig()
        return variant_name("adam", differences(config, override(config, overrides)))

    assert name() == "adam"
    assert name("steps=40") == "adam"
    assert name("steps=10", "noise=0.5") == name("noise=0.50", "steps=10") == "adam+steps=10,noise=0.5"
    assert name("loss=absolute") == "adam+loss=absolute"
    strange = [name("optimizer.betas=0.1,0.2"), name("optimizer.betas=0.10,0.3")]
    assert strange[0] != strange[1]
    assert all("/" not in n and " " not in n and len(n) < 120 for n in strange)


def test_a_foreign_report_is_one_error_that_lists_everything(folder: RunFolder) -> None:
    (folder.path / "report.json").write_text('{"accuracy": 0.9, "seed": "0"}')
    (folder.path / "DONE").touch()
    with pytest.raises(ConfigError) as error:
        folder.status()
    text = str(error.value)
    assert "report.json" in text
    for part in ("accuracy: unknown field", 'seed: expected int, got "0"', "metrics: missing"):
        assert part in text


def test_a_report_of_another_schema_is_refused(folder: RunFolder) -> None:
    folder.finish(make_report())
    path = folder.path / "report.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema": 2}))
    with pytest.raises(ConfigError, match="schema: expected 1, got 2"):
        folder.report()


@pytest.mark.parametrize("change", [{"preset": "sgd"}, {"seed": 1}, {"experiment": "other"}])
def test_a_report_of_another_run_is_refused(folder: RunFolder, change: dict[str, object]) -> None:
    folder.finish(make_report())
    path = folder.path / "report.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(RunError, match=r"is the result of .*, but .*config\.json names tiny/adam/seed0"):
        folder.report()


json_documents = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
).map(lambda value: json.dumps(value).encode())
some_fields = st.dictionaries(st.sampled_from(sorted(to_json(make_report()))), st.integers() | st.text(max_size=3))
near_reports = some_fields.map(lambda changes: json.dumps(to_json(make_report()) | changes).encode())
deep = st.just(b"[" * 100_000)
huge = st.just(b'{"seed": ' + b"9" * 5000 + b"}") | st.just(b'{"wall_s": 1e999}')
contents = st.binary(max_size=40) | json_documents | near_reports | deep | huge


@settings(
    max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None
)
@given(contents, st.sampled_from(["config.json", "report.json", "metrics.jsonl", "checkpoint.json", "results.json"]))
def test_readers_never_fail_with_anything_but_a_run_error(tmp_path: Path, content: bytes, name: str) -> None:
    (tmp_path / name).write_bytes(content)
    readers = {
        "config.json": RunFolder(tmp_path).identity,
        "report.json": RunFolder(tmp_path).report,
        "metrics.jsonl": lambda: read_metrics(tmp_path / name),
        "checkpoint.json": lambda: load_checkpoint(tmp_path),
        "results.json": lambda: read_results(tmp_path / name),
    }
    with contextlib.suppress(RunError):
        readers[name]()


@pytest.mark.parametrize("name", ["config.json", "report.json"])
def test_a_missing_file_is_a_clear_error(tmp_path: Path, name: str) -> None:
    folder = RunFolder(tmp_path)
    with pytest.raises(RunError, match=f"cannot read .*{name}: No such file"):
        folder.identity() if name == "config.json" else folder.report()


def test_nothing_is_recorded_if_anything_is_wrong(tmp_path: Path, folder: RunFolder) -> None:
    other = RunFolder.of(tmp_path / "runs", "tiny", "adam", 1)
    other.prepare("tiny", "adam", 1, TinyConfig())
    folder.finish(make_report())
    with pytest.raises(RunError, match="not finished"):
        add_results([folder, other], tmp_path / "results")
    assert not (tmp_path / "results").exists()


def test_a_lost_result_says_what_to_do(folder: RunFolder) -> None:
    folder.finish(make_report())
    folder.require_result()
    (folder.path / "report.json").write_text("{")
    with pytest.raises(RunError, match="not valid JSON") as error:
        folder.require_result()
    for advice in (f"Delete {folder.path / 'DONE'}", f"splitfg resume {folder.path}", "delete the folder"):
        assert advice in str(error.value)


def test_a_discarded_run_takes_the_empty_folders_above_it_along(tmp_path: Path, folder: RunFolder) -> None:
    other = RunFolder.of(tmp_path / "runs", "tiny", "sgd", 0)
    other.prepare("tiny", "sgd", 0, TinyConfig())
    with folder.locked(), pytest.raises(RunError, match="another process"):
        RunFolder(folder.path).discard()
    folder.discard()
    assert [path.name for path in (tmp_path / "runs/tiny").iterdir()] == ["sgd"]
    other.discard()
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.parametrize("sign", ["DONE", "checkpoint.json", "checkpoint.previous.json"])
def test_a_run_that_began_is_never_discarded(folder: RunFolder, sign: str) -> None:
    (folder.path / sign).touch()
    with pytest.raises(RunError):
        folder.discard()
    assert (folder.path / sign).exists()


def test_an_atomic_write_that_fails_leaves_the_old_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"old")
    with contextlib.suppress(ZeroDivisionError), replacing(path) as temporary:
        temporary.write_bytes(b"new")
        raise ZeroDivisionError
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_unwritable_place_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="cannot write"):
        write_json(tmp_path / "file" / "x.json", {})
    with pytest.raises(RunError, match="cannot make the folder"):
        RunFolder(tmp_path / "file" / "run").prepare("tiny", "adam", 0, TinyConfig())
    with pytest.raises(RunError, match="cannot write"), RunFolder(tmp_path / "file").locked():
        pass


def test_metrics_are_cut_back_to_what_a_checkpoint_knew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path, keep=0)
    writer.append({"step": 1, "loss": 0.5})
    length = writer.sync()
    writer.append({"step": 2, "loss": 0.25})
    writer.close()
    with path.open("ab") as file:
        file.write(b'{"step": 3, "lo')
    assert read_metrics(path) == ({"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25})
    writer = MetricsWriter(path, keep=length)
    writer.append({"step": 2, "loss": 0.125})
    writer.close()
    assert read_metrics(path) == ({"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.125})
    with pytest.raises(RunError, match="lost lines"):
        MetricsWriter(path, keep=10_000)


def test_a_session_that_logs_nothing_knows_how_long_the_metrics_are(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path, keep=0)
    writer.append({"step": 1, "loss": 0.5})
    length = writer.sync()
    writer.append({"step": 2, "loss": 0.25})
    writer.close()
    writer = MetricsWriter(path, keep=length)
    assert writer.sync() == length
    writer.close()


@pytest.mark.parametrize("line", ["[1]", '{"loss": 1}', '{"step": 1, "loss": "x"}', '{"step": NaN}', "{"])
def test_a_bad_metrics_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n')
    with pytest.raises(RunError, match="line 2"):
        read_metrics(path)


def _context(folder: RunFolder, checkpoint: Checkpoint | None = None) -> RunContext:
    return RunContext(folder, checkpoint, device=torch.device("cpu"), emit=lambda event: None)


@pytest.mark.parametrize(
    ("earlier", "now", "recorded"), [(1, "1", 1), (4, "1", 4), (1, "4", 4), (None, "1", None), (1, None, None)]
)
def test_a_resumed_run_records_the_most_runs_that_ever_shared_its_machine(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, earlier: int | None, now: str | None, recorded: int | None
) -> None:
    monkeypatch.delenv("SPLITFG_SIDE_BY_SIDE", raising=False)
    if now is not None:
        monkeypatch.setenv("SPLITFG_SIDE_BY_SIDE", now)
    checkpoint = Checkpoint({"books": {"side_by_side": earlier}}, "")
    with _context(folder, checkpoint) as run:
        assert run.books.side_by_side == recorded


@pytest.mark.parametrize("rows", [[[1.0], [1.0, 2.0]], [[float("nan")]]])
def test_a_matrix_must_be_rectangular_and_finite(folder: RunFolder, rows: list[list[float]]) -> None:
    with _context(folder) as run, pytest.raises(ValueError, match="'confusion'"):
        run.record_matrix("confusion", rows)
