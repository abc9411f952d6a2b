"""The paper's title, and words for metrics and config fields on the axes of figures."""

from __future__ import annotations

from typing import Final

from splitfg_lab.experiments.spec import Curves, Sweep

PAPER: Final = "Backpropagation-Free Trunk Training via the Split Forward Gradients"
"""The paper's title."""

AUTHORS: Final = "Tian Qin and Wei-Min Huang, Lehigh University"

_METRICS: Final = {
    "accuracy": "accuracy, %",
    "loss": "training loss",
    "rmse": "root mean squared error",
    "test_loss": "test loss",
    "trunk_moved": "distance moved by the trunk, initial norms",
    "trunk_share": "share of the gradient's energy in the trunk",
    "val_nll": "validation loss, nats per token",
    "val_ppl": "validation perplexity",
}
_FIELDS: Final = {
    "classes": "number of classes",
    "method.K": "number of tangents K",
    "model.context": "tokens in a window",
    "model.layers": "layers",
    "rho": "trunk step scale rho",
}
_X: Final = {"step": "training step", "wall_s": "time, seconds"}
_TIMED: Final = "time, seconds (steps times measured step time)"


def axis_labels(figure: Curves | Sweep) -> tuple[str, str]:
    """Return the labels of the x and y axes."""
    if isinstance(figure, Curves):
        return _TIMED if figure.step_ms else _X[figure.x], figure.y_label or metric_words(figure.metric)
    y = figure.y_label or ", ".join(figure.labels or map(metric_words, figure.metrics))
    return figure.x_label or field_words(figure.field), y


def metric_words(metric: str) -> str:
    """Return words for a metric; its name with spaces if there are none."""
    return _METRICS.get(metric, metric.replace("_", " "))


def field_words(field: str) -> str:
    """Return words for a dotted config field; the name of its last part with spaces if there are none."""
    return _FIELDS.get(field, field.rpartition(".")[2].replace("_", " "))
