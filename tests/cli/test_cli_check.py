"""``doctor`` and ``diagnose``: what works here, and how noisy Split-FG is on a model of one's own."""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from command_line import splitfg, splitfg_here

from splitfg_lab.commands import _features

MODEL = """
import torch
from splitfg import split

def build():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
    return split(model), torch.randn(8, 5), torch.randint(0, 3, (8,))
"""


def test_diagnose_measures_a_model_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "my_model.py").write_text(MODEL)
    done = splitfg("diagnose", "my_model:build", "--K", "4", "--draws", "20", "--steps", "1000", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    # the trunk is 5 x 7 + 7, the head 7 x 3 + 3; 1,000 steps of 4 tangents over 42 parameters
    for part in ("trunk 42, head 24", "K=4, 20 draws", f"{4000 / 42:.2g} probes per trunk parameter"):
        assert part in done.stdout


def test_diagnose_seeds_what_the_model_is_made_of(tmp_path: Path) -> None:
    lines = MODEL.replace("    torch.manual_seed(0)\n", "    print(random.random(), np.random.rand())\n")
    (tmp_path / "drawn_model.py").write_text(f"import random\nimport numpy as np\n{lines}")
    options = ("diagnose", "drawn_model:build", "--draws", "2", "--seed")
    said = [splitfg_here(*options, seed, cwd=tmp_path).stdout for seed in ("0", "0", "1")]
    assert said[0] == said[1]
    for first, other in zip(said[0].splitlines()[:4], said[2].splitlines()[:4], strict=True):
        assert first.startswith("parameters") or first != other


@pytest.mark.parametrize(
    ("name", "returned", "got"),
    [
        ("linear", "model", "returned Linear;"),
        ("none", "None", "returned NoneType;"),
        ("pair", "model, x", "returned 2 values;"),
        ("three", "model, x, x", "returned Linear as the first of three values;"),
    ],
)
def test_diagnose_says_what_a_function_must_return(tmp_path: Path, name: str, returned: str, got: str) -> None:
    lines = f"def build():\n    model, x = torch.nn.Linear(2, 2), torch.ones(3, 2)\n    return {returned}\n"
    (tmp_path / f"model_{name}.py").write_text(f"import torch\n\n{lines}")
    done = splitfg_here("diagnose", f"model_{name}:build", cwd=tmp_path)
    assert done.returncode == 2
    assert f"model_{name}:build {got} expected a function without arguments that returns (split, x, y)" in done.stderr
    assert "Traceback" not in done.stderr


def test_features_are_found_by_using_them() -> None:
    features = list(islice(_features.probe_features(torch.device("cpu")), 3))
    assert all(feature.works for feature in features), features


def test_a_feature_that_raises_is_a_feature_that_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: torch.Tensor, __: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("no forward-mode rule\nand a long story")

    monkeypatch.setattr(_features, "_push", broken)
    feature = next(_features.probe_features(torch.device("cpu")))
    assert (feature.works, feature.needed, feature.detail) == (False, True, "NotImplementedError: no forward-mode rule")


def test_a_wrong_derivative_is_a_feature_that_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_features, "_push", lambda x, v: torch.zeros(4, dtype=torch.float64))
    assert not next(_features.probe_features(torch.device("cpu"))).works


@pytest.mark.slow
def test_doctor_looks_everywhere(tmp_path: Path) -> None:
    done = splitfg_here("doctor", cwd=tmp_path, XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 0
    for part in ("python", "torch", "cpu", "vmap over jvp", "torch.compile", "missing", "adult"):
        assert part in done.stdout
