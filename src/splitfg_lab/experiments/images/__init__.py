"""Images: CIFAR-10 and CIFAR-100 with all methods of the paper, and the flat-head ablation."""

from __future__ import annotations

from splitfg_lab.experiments._search import BEFORE
from splitfg_lab.experiments.images._config import ABLATION, FULL, ImageTraining
from splitfg_lab.experiments.images._figures import figures
from splitfg_lab.experiments.images._networks import Backbone, FlatNetwork, PlainMLP
from splitfg_lab.experiments.images._presets import presets
from splitfg_lab.experiments.images._report_tables import headlines, tables
from splitfg_lab.experiments.spec import Experiment

__all__ = ["ABLATION", "EXPERIMENT", "FULL", "SMOKE", "Backbone", "FlatNetwork", "ImageTraining", "PlainMLP"]

SMOKE = ("dataset=synthetic", "steps=2", "horizon=2", "warmup=1", "batch=4", "evaluations=1", "checkpoints=1")
"""Overrides for a run of a few seconds on synthetic data."""

EXPERIMENT = Experiment(
    name="images",
    title="Images: seven methods on CIFAR-10 and CIFAR-100",
    source="Section 4.3, Tables 2 and 12, Appendix F",
    runner="splitfg_lab.experiments.images.run:run",
    presets=presets(),
    tables=tables(),
    figures=figures(),
    smoke=SMOKE,
    headlines=headlines(),
    earlier=(
        ("adaptive", False),
        *BEFORE,
        ("method:DirectPathMethod.tied_share", 1.0),
        ("method:ParallelPullMethod.skips", False),
        ("method:ParallelPullMethod.group", 1),
        ("method.feedback:MeanJacobianFeedback.limit", None),
        ("method:PredictiveCodingMethod.power_iterations", 0),
    ),
)
