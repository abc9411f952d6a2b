"""``make bench`` prints; only ``--record`` writes, as a whole, with what the numbers rest on."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from splitfg_lab.runs.environment import describe_device, source_revision

command = importlib.import_module("benchmarks.__main__")

FOUND: dict[str, Any] = {
    "step": [{"case": "toy", "ms": {"backprop": 2.0}, "ratio_to_backprop": {"backprop": 1.0}}],
    "feedback": [{"case": "toy", "ms": {"backprop": 2.0}, "peak_mib": {"backprop": 4.0}}],
    "chunk": {"case": "gpt", "ms": {"backprop": 4.0}, "peak_mib": {"backprop": 8.0}},
    "head": {"case": "head", "ms": {"autograd": 4.0}, "peak_mib": {"autograd": 8.0}},
}


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """The recorded file, with something in it; nothing is measured."""
    path = tmp_path / "recorded.json"
    path.write_text("as it was")
    monkeypatch.setattr(command, "RECORDED", path)
    monkeypatch.setattr(command, "measure", lambda device, repeats: FOUND)
    return path


def test_printing_writes_nothing(recorded, capsys):
    command.main([])
    assert "2.00 ms" in capsys.readouterr().out
    assert recorded.read_text() == "as it was"
    assert list(recorded.parent.iterdir()) == [recorded]


def test_what_is_recorded_says_what_it_rests_on(recorded):
    command.main(["--record"])
    found = json.loads(recorded.read_text())
    revision = source_revision()
    assert found.items() >= FOUND.items()
    assert found["git"] == (None if revision is None else revision.commit)
    assert found["git_dirty"] == (None if revision is None else revision.dirty)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert (found["device"], found["threads"]) == (describe_device(device), torch.get_num_threads())
    assert {"date", "torch", "python"} <= set(found)


def test_a_record_may_go_elsewhere(recorded, tmp_path):
    command.main(["--record", str(tmp_path / "new" / "mine.json")])
    assert recorded.read_text() == "as it was"
    assert json.loads((tmp_path / "new" / "mine.json").read_text())["head"] == FOUND["head"]


def test_a_record_that_cannot_be_finished_leaves_the_old_one(recorded, monkeypatch):
    monkeypatch.setattr(command, "measure", lambda device, repeats: FOUND | {"more": float("nan")})
    with pytest.raises(ValueError, match="JSON"):
        command.main(["--record"])
    assert recorded.read_text() == "as it was"
