"""Every example runs at a small size, and shows what it promises."""

import runpy
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(path.stem for path in EXAMPLES.glob("*.py"))


def run_smoke(name, monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--smoke", *map(str, arguments)])
    with torch.random.fork_rng(devices=[]):
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpt_direct_path", ("frozen trunk", "direct path, learned maps", "backprop")),
        ("hardware", ("runs of the device", "held-out accuracy")),
        ("lora", ("SplitFG, K = 16", "MeZO's, two passes", "backprop keeps")),
        ("memory", ("one by one, lean, blocks", "backprop would keep")),
        ("own_estimator", ("keeps the contract", "loss")),
        ("own_loop", ("activity tangents, K = 8", "backprop")),
        ("own_model", ("cut at the classifier", "cut after the embedding")),
        ("stages", ("eight pulls", "two pulls: loss")),
        ("tables", ("activity tangents, K = 8", "gradient boosting")),
    ],
)
def test_example_runs(name, words, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    printed = run_smoke(name, monkeypatch, capsys)
    assert all(word in printed for word in words)


def test_experiment_runs_and_reports(monkeypatch, capsys, tmp_path):
    printed = run_smoke("own_experiment", monkeypatch, capsys, "--runs", tmp_path)
    assert "Held-out accuracy" in printed
    assert len(list(tmp_path.glob("wine/*/seed0/DONE"))) == 3


def test_direct_path_beats_the_frozen_trunk():
    example = runpy.run_path(str(EXAMPLES / "gpt_direct_path.py"))
    import splitfg

    direct, frozen = (example["train"](e, 0.1, 30) for e in (splitfg.DirectPath(), splitfg.FrozenTrunk()))
    assert direct < frozen


@pytest.mark.parametrize("name", SCRIPTS)
def test_examples_are_short_and_documented(name):
    lines = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()
    assert 40 <= len(lines) <= 90
    assert lines[0].startswith('"""')
    assert f"python examples/{name}.py" in "\n".join(lines)


def test_every_example_is_run():
    assert len(SCRIPTS) == 10
