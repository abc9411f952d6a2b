"""The paper's image results, and the cell of an accuracy."""

from __future__ import annotations

from splitfg_lab.experiments.spec import Cell, Paper

MAIN = {
    "cifar10": ((88.2, 0.6), (29.5, 1.9), (29.3, 1.4), (48.8, 0.4), (40.7, 1.1), (10.0, 0.0), (60.5, 1.2)),
    "cifar100": ((65.6, 1.0), (1.2, 0.2), (1.2, 0.1), (6.9, 0.5), (1.0, 0.0), (1.4, 0.3), (35.2, 0.5)),
}
"""The paper's accuracies in %, mean and standard deviation over five seeds, in the order of ``METHOD_TITLES``."""

FROZEN = {"cifar10": (55.2, 60.5), "cifar100": (34.8, 35.2)}
"""The paper's frozen trunk and Split-FG in its control of a single seed."""


def top1(preset: str, paper: Paper | None = None) -> Cell:
    """Return the cell of a preset's accuracy."""
    return Cell(preset, "accuracy", paper)
