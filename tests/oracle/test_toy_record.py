"""The recorded toy run agrees with theory as the README says: recomputed from the file, not read off it."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from splitfg_lab.experiments.toy_variance import EXPERIMENT, ToyVariance
from splitfg_lab.experiments.toy_variance.run import make
from splitfg_lab.runs import from_json
from splitfg_lab.runs.results import read_results

RECORDED = Path(__file__).parents[2] / "results" / "toy_variance.json"
REPORTS = {record.report.preset: record.report for record in read_results(RECORDED)}

every_preset = pytest.mark.parametrize("preset", [p.name for p in EXPERIMENT.presets])


def standard_error(draws):
    """Of the ratio of two independent means, relative, derived from the law of a draw.

    A squared error is ‖d v - g‖² ≈ d² ‖v‖² with d ~ N(0, ‖g‖²): a multiple of χ² with one degree of freedom, whose
    standard deviation is √2 times its mean (‖v‖² hardly varies over 1,600 coordinates).
    """
    return math.sqrt(2 * 2 / draws)


@every_preset
def test_ran_as_the_preset_says(preset):
    (expected,) = [p for p in EXPERIMENT.presets if p.name == preset]
    report = REPORTS[preset]
    assert (report.status, report.seed) == ("done", 0)
    assert from_json(ToyVariance, report.config) == expected.config


@every_preset
def test_measured_agrees_with_theory_within_two_standard_errors(preset):
    metrics, draws = REPORTS[preset].metrics, REPORTS[preset].config["draws"]
    measured = metrics["variance_split"] / metrics["variance_pure"]
    assert abs(measured / metrics["energy_ratio"] - 1) < 2 * standard_error(draws)
    assert metrics["measured_ratio"] == pytest.approx(measured, rel=1e-6)
    assert metrics["relative_error_percent"] == pytest.approx(
        100 * abs(measured / metrics["energy_ratio"] - 1), abs=1e-3
    )
    assert metrics["standard_error_percent"] == pytest.approx(100 * standard_error(draws), rel=0.1)


@every_preset
def test_theory_is_the_gradients_energy(preset):
    """‖g_trunk‖² / ‖g‖² of the very network and batch, by autograd in float64."""
    config = from_json(ToyVariance, REPORTS[preset].config)
    split, x, y = make(config, torch.Generator().manual_seed(REPORTS[preset].seed))
    trunk, (layer,) = split.trunk.double(), split.head.double().layers
    outputs = layer(trunk(x.double()))
    # the ratio does not depend on what the loss is divided by
    loss = F.cross_entropy(outputs, y) if config.loss == "cross_entropy" else (outputs - y.double()).square().sum()
    loss.backward()
    in_trunk, in_head = (sum(p.grad.square().sum() for p in part.parameters()) for part in (trunk, layer))
    assert REPORTS[preset].metrics["energy_ratio"] == pytest.approx(float(in_trunk / (in_trunk + in_head)), rel=1e-4)
