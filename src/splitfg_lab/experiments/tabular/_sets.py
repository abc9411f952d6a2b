"""The data sets and methods of the paper's tabular table, with its numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from splitfg_lab.experiments._titles import METHOD_TITLES
from splitfg_lab.experiments.spec import Paper


@dataclass(frozen=True)
class DataRow:
    """A row of the table: a data set and what the paper reports for it, by method."""

    name: str
    label: str
    metric: str
    paper: dict[str, Paper]

    @property
    def better(self) -> Literal["lower", "higher"]:
        """Which way its metric improves."""
        return "higher" if self.metric == "accuracy" else "lower"

    @property
    def decimals(self) -> int:
        """Digits worth printing of its metric."""
        return 1 if self.metric == "accuracy" else 3


def _row(name: str, label: str, metric: str, *values: tuple[float, float] | None) -> DataRow:
    paper = {m: Paper(*v) for m, v in zip(METHOD_TITLES, values, strict=True) if v is not None}
    return DataRow(name, label, metric, paper)


def _accuracy(name: str, label: str, *values: tuple[float, float]) -> DataRow:
    return _row(name, label, "accuracy", *values)


def _rmse(name: str, label: str, *values: tuple[float, float]) -> DataRow:
    """Forward-Forward is defined for classes only."""
    return _row(name, label, "rmse", *values[:3], None, *values[3:])


DATA = (
    _accuracy(
        "adult", "Adult",
        (84.2, 0.5), (81.7, 0.1), (81.8, 0.1), (81.6, 0.5), (81.5, 0.4), (79.1, 0.4), (82.5, 0.4),
    ),
    _accuracy(
        "higgs_small", "Higgs Small (subset)",
        (68.8, 0.7), (59.0, 0.6), (59.0, 0.6), (61.7, 0.4), (61.5, 0.4), (55.4, 0.3), (61.9, 0.3),
    ),
    _accuracy(
        "otto", "Otto",
        (78.3, 0.4), (62.8, 0.6), (62.8, 0.6), (30.8, 3.5), (68.8, 0.4), (62.3, 0.7), (71.7, 0.4),
    ),
    _accuracy(
        "covertype", "Covertype",
        (71.7, 0.5), (61.2, 0.2), (61.2, 0.2), (35.0, 2.2), (65.5, 0.6), (62.1, 1.1), (66.8, 0.6),
    ),
    _rmse(
        "california", "California",
        (0.491, 0.013), (0.595, 0.012), (0.595, 0.012), (0.638, 0.015), (0.755, 0.014), (0.564, 0.016),
    ),
    _rmse(
        "house_16h", "House 16H",
        (0.652, 0.024), (0.829, 0.027), (0.829, 0.027), (0.838, 0.033), (0.859, 0.040), (0.773, 0.030),
    ),
    _rmse(
        "diamond", "Diamond",
        (0.249, 0.004), (0.334, 0.006), (0.334, 0.006), (0.452, 0.001), (0.490, 0.003), (0.311, 0.004),
    ),
    _rmse(
        "black_friday", "Black Friday",
        (0.809, 0.006), (0.906, 0.003), (0.906, 0.003), (0.901, 0.004), (0.938, 0.005), (0.890, 0.006),
    ),
)  # fmt: skip
"""The eight data sets in the paper's order: accuracy in %, RMSE in standard deviations of the target."""
