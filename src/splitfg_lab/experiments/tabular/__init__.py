"""Table 1: seven methods on eight tabular data sets, five folds each, and rows beyond the paper."""

from __future__ import annotations

from splitfg_lab.experiments.spec import Experiment
from splitfg_lab.experiments.tabular._config import FOLDS, Tabular
from splitfg_lab.experiments.tabular._presets import presets
from splitfg_lab.experiments.tabular._report_tables import figures, headlines, tables

__all__ = ["EXPERIMENT", "FOLDS", "Tabular"]

EXPERIMENT = Experiment(
    name="tabular",
    title="Tables: seven methods on eight data sets",
    source="Section 4.2, Table 1",
    runner="splitfg_lab.experiments.tabular.run:run",
    presets=presets(),
    tables=tables(),
    figures=figures(),
    headlines=headlines(),
    earlier=(("adaptive", False), ("method:PredictiveCodingMethod.power_iterations", 0)),
    no_checkpoints=("*-linear", "*-sklearn_mlp", "*-boosting"),
)
