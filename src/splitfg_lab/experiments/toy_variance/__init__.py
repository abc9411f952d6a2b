"""Variance at the split: one trunk under linear heads of growing size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from splitfg.errors import raise_if
from splitfg.recipes.checks import below
from splitfg_lab.experiments.spec import Cell, Experiment, Paper, Preset, Row, Sweep, Table


@dataclass(frozen=True)
class ToyVariance:
    """A 16-32-32 ReLU trunk (1,600 parameters) under a linear head, on one random minibatch.

    Attributes:
        classes: Outputs C of the head.
        loss: Loss on the outputs.
        draws: Single-tangent estimates of each method, from which the variance is measured.
        batch: Rows of the minibatch.
    """

    classes: int
    loss: Literal["cross_entropy", "squared_error"] = "cross_entropy"
    draws: int = 2000
    batch: int = 64

    def __post_init__(self) -> None:
        raise_if(below(1, self, "classes", "batch") + below(2, self, "draws"))


CLASSES = (50, 500, 5000)
_SHORT = {"cross_entropy": "ce", "squared_error": "se"}
_PAPER = {  # measured ratio, energy theory, relative error in percent
    50: (0.7162, 0.6993, 2.4),
    500: (0.6875, 0.6727, 2.2),
    5000: (0.5689, 0.6104, 6.8),
}


def _preset(classes: int, loss: Literal["cross_entropy", "squared_error"]) -> Preset:
    title = f"{classes} classes" if loss == "cross_entropy" else f"{classes} outputs, squared error"
    return Preset(f"{_SHORT[loss]}-c{classes}", title, ToyVariance(classes, loss))


def _row(classes: int, loss: str) -> Row:
    name = f"{_SHORT[loss]}-c{classes}"
    total = 1600 + 33 * classes
    paper = _PAPER[classes] if loss == "cross_entropy" else None
    return Row(
        f"{classes:,} {'classes' if paper else 'outputs'}",
        (
            f"{total:,}",
            f"{1600 / total:.4f}",
            Cell(name, "measured_ratio", Paper(paper[0]) if paper else None),
            Cell(name, "energy_ratio", Paper(paper[1]) if paper else None),
            Cell(name, "relative_error_percent", Paper(paper[2]) if paper else None, decimals=1),
            Cell(name, "standard_error_percent", decimals=1),
        ),
    )


def _table(loss: str, key: str, title: str, note: str) -> Table:
    columns = ("P_total", "P_trunk / P_total", "Measured", "Energy theory", "Rel. error, %", "Std. error, %")
    return Table(key, title, columns, tuple(_row(c, loss) for c in CLASSES), decimals=4, note=note)


EXPERIMENT = Experiment(
    name="toy_variance",
    title="Variance at the split",
    source="Section 4.1, Table 5 and Figure 2",
    runner="splitfg_lab.experiments.toy_variance.run:run",
    smoke=("draws=2",),
    presets=tuple(_preset(c, loss) for loss in ("cross_entropy", "squared_error") for c in CLASSES),
    tables=(
        _table(
            "cross_entropy",
            "toy-variance",
            "Trunk-coordinate variance of Split-FG over pure forward gradient, cross-entropy",
            "The ratios depend on the initialisation, which the paper does not give (here W ~ N(0, 1/fan_in))."
            " Compare the measured ratio with theory's: they should agree within two standard errors of the draws.",
        ),
        _table(
            "squared_error",
            "toy-variance-squared",
            "The same with squared error",
            "The paper names squared loss for the toy model but prints no numbers for it.",
        ),
    ),
    figures=(
        Sweep(
            "toy-variance-total",
            "Total variance over trunk coordinates as the head grows",
            tuple(f"ce-c{c}" for c in CLASSES),
            "classes",
            ("variance_pure", "variance_split"),
            y_label="total variance",
            labels=("pure forward gradient", "Split-FG"),
        ),
        Sweep(
            "toy-variance-ratio",
            "The measured ratio follows the gradient energy, not the parameter count",
            tuple(f"ce-c{c}" for c in CLASSES),
            "classes",
            ("measured_ratio", "energy_ratio", "count_ratio"),
            y_label="Split-FG / pure forward gradient",
            labels=("measured", "gradient energy", "parameter count"),
        ),
    ),
)
