"""The compatibility table: measured cells, its record and its page."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from splitfg_lab.compatibility import CASES, METHODS, UPDATES, Case, add_rows, measure, measured_rows, page, read_rows
from splitfg_lab.compatibility.__main__ import main

RECORDED = Path(__file__).parents[2] / "benchmarks" / "compatibility.json"


class Small(nn.Module):
    """One hidden layer."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.first(x).tanh())


def built(make):
    return lambda: (make(), (torch.randn(4, 3), torch.randint(0, 3, (4,))))


GOOD = Case("torch", "small", built(Small))
BAD = Case("torch", "none", built(lambda: nn.Sequential(nn.Tanh())))
BROKEN = Case("torch", "broken", built(lambda: nn.Linear(7, 3)))


def test_cells_of_a_model_that_works():
    cells = measure(GOOD)
    assert set(cells) == set(METHODS)
    exact = {name for name, cell in cells.items() if cell.status == "exact"}
    assert exact >= {"SplitFG", "ForwardGradient", "ActivityFG", "Backprop", "FrozenTrunk"}
    assert cells["EvolutionStrategy"].status == "approximate"
    assert cells["PredictiveCoding"].status == "refused"
    assert cells["FrozenTrunk"].reached == (0, 2)


def test_cells_of_models_that_do_not():
    assert {cell.status for cell in measure(BAD).values()} == {"failed"}  # autograd finds nothing to differentiate
    assert {cell.status for cell in measure(BROKEN).values()} == {"failed"}


def test_a_wrong_estimate_is_not_exact(monkeypatch):
    """A cell comes from the comparison, not from the estimator's own word."""
    from splitfg import SplitFG
    from splitfg_lab.compatibility import _measure

    honest = SplitFG._scores
    monkeypatch.setattr(SplitFG, "_scores", lambda *given: 1.001 * honest(*given))
    cell = _measure.measure(GOOD)["SplitFG"]
    assert cell.status == "approximate"
    assert cell.error == pytest.approx(1e-3, rel=2.0)


def test_rows_replace_those_of_the_same_model(tmp_path):
    path = tmp_path / "table.json"
    (row,) = measured_rows([GOOD])
    add_rows(path, [{**row, "cells": {}}, {**row, "name": "other"}])
    add_rows(path, [row])
    assert [r["name"] for r in read_rows(path)] == ["small", "other"]
    assert read_rows(path)[0]["cells"] == json.loads(json.dumps(row["cells"]))
    assert set(row["origin"]) >= {"versions", "date", "python", "device", "revision"}


def test_command(tmp_path, capsys):
    main(["--record", str(tmp_path / "t.json"), "--library", "torch", "--name", "Embedding"])
    assert "SplitFG:exact" in capsys.readouterr().out
    assert [row["name"] for row in read_rows(tmp_path / "t.json")] == ["Embedding with padding_idx"]


def test_command_resumes_and_measures_in_processes(tmp_path, capsys):
    """Rows in a file are left out; those of several processes are the rows of one, in the order of the models."""
    path, names = tmp_path / "t.json", ["MLP", "Embedding with padding_idx", "MLP with dropout, training"]
    main(["--library", "torch", "--only", names[1], "--record", str(path), "--skip", str(path)])
    first = read_rows(path)
    choice = ["--library", "torch", "--only", *names, "--skip", str(path), "--workers", "2"]
    main([*choice, "--record", str(path)])
    assert [row["name"] for row in read_rows(path)] == [
        c.name for c in CASES if c.name in names and c.library == "torch"
    ]
    assert [row for row in read_rows(path) if row["name"] == names[1]] == first
    (alone,) = measured_rows(c for c in CASES if (c.library, c.name) == ("torch", "MLP"))
    assert read_rows(path)[0]["cells"] == json.loads(json.dumps(alone["cells"]))
    capsys.readouterr()
    main(choice)
    assert capsys.readouterr() == ("", "0 models to measure\n")


def test_command_reports_mistakes(capsys, monkeypatch):
    with pytest.raises(SystemExit):
        main(["--only", "Nothing"])
    assert "there is no model Nothing" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--workers", "0"])
    monkeypatch.setattr("splitfg_lab.compatibility.__main__.CASES", (BROKEN,))
    with pytest.raises(SystemExit, match="11 cells failed"):
        main([])
    assert "broken, SplitFG: RuntimeError" in capsys.readouterr().err


def test_page_shows_every_cell():
    rows = read_rows(RECORDED)
    text = page(rows, UPDATES)
    table = [line for line in text.splitlines() if line.startswith("| ") and "SplitFG" not in line]
    assert len(table) == len(rows)
    assert all(line.count("|") == len(METHODS) + 2 for line in table)
    reasons = {c["reason"].splitlines()[0] for r in rows for c in r["cells"].values() if "reason" in c}
    assert f"\n{len(reasons)}. " in text


def test_recorded_rows_cover_enough():
    rows = read_rows(RECORDED)
    assert len(rows) >= 40
    assert {row["library"] for row in rows} >= {"torch", "splitfg", "transformers", "peft"}
    assert all(set(row["cells"]) == set(METHODS) for row in rows)
    assert not [(row["name"], c) for row in rows for c in row["cells"].values() if c["status"] == "failed"]
    names = {case.name for case in CASES}
    assert {row["name"] for row in rows} <= names


def test_rounding_is_told_from_an_error_by_float64(monkeypatch):
    """An error between 1e-5 and 1e-3 that vanishes in float64 has a label of its own, never plain "exact"."""
    from splitfg import SplitFG
    from splitfg_lab.compatibility import _measure

    honest = SplitFG._scores

    def rounded(*given):
        scores = honest(*given)
        return scores * (1 + 1e-4) if scores.dtype == torch.float32 else scores

    monkeypatch.setattr(SplitFG, "_scores", rounded)
    cell = _measure.measure(GOOD, ["SplitFG"])["SplitFG"]
    assert cell.status == "rounding"
    assert cell.error > 1e-5
    assert cell.double < 1e-9
    row = {
        "library": "torch",
        "name": "small",
        "cells": {"SplitFG": {"status": "rounding", "error": 1e-4, "double": 1e-15}},
    }
    assert "(✓) 1e-04, 1e-15 in float64" in page([{**row, "origin": next(measured_rows([GOOD]))["origin"]}], UPDATES)
    monkeypatch.setattr(SplitFG, "_scores", lambda *given: honest(*given) * (1 + 1e-4))
    wrong = _measure.measure(GOOD, ["SplitFG"])["SplitFG"]
    assert (wrong.status, wrong.double) == ("approximate", None)


def test_merge_of_a_second_file(tmp_path, capsys):
    (row,) = measured_rows([GOOD])
    own, other = tmp_path / "own.json", tmp_path / "other.json"
    add_rows(own, [row, {**row, "name": "kept"}])
    add_rows(other, [{**row, "library": "timm"}, {**row, "cells": {}}])
    main(["--merge", str(other), "--record", str(own)])
    assert [(r["library"], r["name"]) for r in read_rows(own)] == [
        ("torch", "small"),
        ("torch", "kept"),
        ("timm", "small"),
    ]
    assert read_rows(own)[0]["cells"] == {}
    assert "2 rows" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--merge", str(tmp_path / "none.json"), "--record", str(own)])


def test_truth_at_a_layer_that_is_written_over_in_place():
    """The gradient at an output is the one before an activation writes over it."""

    def made():
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Linear(4, 3))

    assert measure(Case("torch", "in place", built(made)), ["ActivityFG"])["ActivityFG"].status == "exact"
