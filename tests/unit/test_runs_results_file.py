"""The format of results files: small, lossless, and as readable as the format before."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from test_runs_folder import make_report

from splitfg_lab.experiments import EXPERIMENTS
from splitfg_lab.report import build_report
from splitfg_lab.runs import RunError, RunRecord, RunReport, to_json
from splitfg_lab.runs._results_file import decode, encode
from splitfg_lab.runs.results import add_records, read_results

ROOT = Path(__file__).parents[2]
RECORDED = sorted((ROOT / "results").glob("*.json"))
EARLIER = ROOT / "tests" / "earlier" / "demo.json"
"""``results/demo.json`` as schema 1 wrote it."""

CURVE = ({"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25, "error": 1.5})


def of_schema_1(runs: Sequence[tuple[RunReport, Any]]) -> dict[str, Any]:
    """The format before, written out: every run has all fields of its report."""
    return {"schema": 1, "experiment": "tiny", "runs": [to_json(report) | {"curve": curve} for report, curve in runs]}


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_recorded_files_are_small_and_as_the_code_writes_them(path: Path) -> None:
    content = path.read_bytes()
    assert len(content) < 2**20
    assert encode(*decode(json.loads(content))) == content


def test_runs_come_back_unchanged() -> None:
    """Numbers keep their types: 1 and 1.0 are different configs on paper, and so are ``None`` and a missing field."""
    reports = [
        make_report(seed=0),
        make_report(seed=1, config={"rate": 1, "betas": [0.5, None], "nested": {"a": True}}),
        make_report(seed=2, config={"rate": 1.0, "betas": [], "nested": {}}, git=None, git_dirty=None),
        make_report(seed=3, side_by_side=2, ranks=4, message="why", block_backward=0.0, step_ms=None),
        make_report(seed=4, matrices={"confusion": ((1.0, 0.0), (0.5, 0.5))}, data_digests={"a": "sha256:0"}),
    ]
    curves: list[Any] = [CURVE, (), ({"step": 1, "loss": 2.0},), ({"loss": 1.0},), ({"step": 3}, {"loss": 1.0})]
    runs = list(zip(reports, curves, strict=True))
    name, found = decode(json.loads(encode("tiny", runs)))
    assert name == "tiny"
    assert repr(found) == repr(runs) == repr(decode(json.loads(json.dumps(of_schema_1(runs))))[1])


def test_what_runs_share_is_written_once() -> None:
    runs = [(make_report(seed=seed, config={"width": 128}), CURVE) for seed in range(3)]
    other = (make_report(seed=3, config={"width": 256}, git="b" * 40), CURVE)
    written = encode("tiny", [*runs, other]).decode()
    assert (written.count('"width":128'), written.count('"width":256'), written.count('"versions"')) == (1, 1, 2)
    assert written.count("[1,2]") == 1
    fewer = encode("tiny", runs).decode()
    assert _lines(fewer) < _lines(written), "a new run changed the lines of others"


def _lines(text: str) -> set[str]:
    return {line.rstrip(",") for line in text.splitlines()}


def test_an_earlier_file_gives_the_same_report_before_and_after_it_is_rewritten(tmp_path: Path) -> None:
    demo = [experiment for experiment in EXPERIMENTS if experiment.name == "demo"]
    for place in ("before", "after"):
        (tmp_path / place / "results").mkdir(parents=True)
        (tmp_path / place / "results" / "demo.json").write_bytes(EARLIER.read_bytes())
    after = tmp_path / "after" / "results" / "demo.json"
    before = read_results(after)
    add_records(before, after.parent)  # `splitfg results add results/demo.json`
    assert json.loads(after.read_bytes())["schema"] == 2
    assert after.stat().st_size < EARLIER.stat().st_size
    assert [run.report for run in read_results(after)] == [run.report for run in before]
    for place in ("before", "after"):
        build_report(tmp_path / "none", tmp_path / place / "results", tmp_path / place, demo)
    for name in ("report.html", "report.md"):
        assert (tmp_path / "before" / name).read_bytes() == (tmp_path / "after" / name).read_bytes()
    assert "97." in (tmp_path / "before" / "report.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("together", "recorded"), [(1, True), (2, False), (None, False)])
def test_seconds_of_a_curve_are_recorded_only_if_they_can_be_compared(
    tmp_path: Path, together: int | None, recorded: bool
) -> None:
    curve = tuple({**point, "wall_s": 0.5} for point in CURVE)
    (path,) = add_records([RunRecord(make_report(side_by_side=together), curve, "")], tmp_path)
    (run,) = read_results(path)
    assert run.curve == (curve if recorded else CURVE)


def test_references_to_nothing_are_listed_together(tmp_path: Path) -> None:
    path = tmp_path / "tiny.json"
    data = json.loads(encode("tiny", [(make_report(seed=seed), CURVE) for seed in (0, 1)]))
    del data["runs"][0]["environment"]
    data["runs"][1]["settings"] = "gone"
    data["columns"] = {}
    path.write_text(json.dumps(data))
    with pytest.raises(RunError) as caught:
        read_results(path)
    for place in ("runs[0].environment", "runs[1].settings", "runs[0].curve.step", "runs[1].curve.step"):
        assert f"{place}: the tables of this file have no entry" in str(caught.value)


@pytest.mark.parametrize("schema", [3, "2", None])
def test_a_later_format_is_an_error(tmp_path: Path, schema: Any) -> None:
    (tmp_path / "tiny.json").write_text(json.dumps({"schema": schema, "experiment": "tiny", "runs": []}))
    with pytest.raises(RunError, match=r"schema: expected 1 \| 2"):
        read_results(tmp_path / "tiny.json")


def test_an_edited_config_is_an_error_in_both_formats() -> None:
    from splitfg_lab.runs.digests import config_digest

    report = make_report(config={"width": 128})
    report = replace(report, config_digest=config_digest(report.config))
    for data in (json.loads(encode("tiny", [(report, ())])), of_schema_1([(report, ())])):
        edited = json.dumps(data).replace('"width": 128', '"width": 64')
        with pytest.raises(RunError, match="its digest is not config_digest"):
            decode(json.loads(edited))
