"""Figures of an experiment as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from splitfg_lab.experiments._table_spec import Cell


@dataclass(frozen=True)
class Curves:
    """A figure of a metric over training: one line per preset, mean over seeds.

    Attributes:
        x: ``step``, or ``wall_s`` for seconds. A report draws a figure over seconds only if every run had its machine
            to itself and all ran on one kind of device.
        references: Horizontal lines: label and value.
        y_label: Words for the metric; the report has defaults for common metrics.
        step_ms: Presets, each with the cell (usually of another experiment) that holds the milliseconds of its step.
            If given, the x axis is time: steps times these. A report leaves out presets whose step was not timed.
        over: The preset whose mean curve divides those of all presets at the same steps; empty for none.
    """

    key: str
    title: str
    presets: tuple[str, ...]
    metric: str
    x: Literal["step", "wall_s"] = "step"
    log_x: bool = False
    log_y: bool = False
    references: tuple[tuple[str, float], ...] = ()
    y_label: str = ""
    step_ms: tuple[tuple[str, Cell], ...] = ()
    over: str = ""

    def __post_init__(self) -> None:
        if self.step_ms and self.x != "step":
            raise ValueError(f"figure {self.key}: step times scale the axis of steps; leave out x={self.x!r}")
        if self.over and (self.step_ms or self.x != "step"):
            raise ValueError(f"figure {self.key}: curves are divided at the same steps; leave out times")


@dataclass(frozen=True)
class Sweep:
    """A figure of final metrics against a config field: one line per metric, one point per preset.

    ``field`` is a dotted path into the config (``classes``, ``optimizer.rho``); ``labels`` name the lines.

    Attributes:
        lines: Presets of every line, where several share one metric; ``presets`` then lists all of them.
        over: Presets whose values divide those of the lines at the same value of the field.
        most: Where the y axis ends; larger values are printed above it. ``None`` for the largest value.
    """

    key: str
    title: str
    presets: tuple[str, ...]
    field: str
    metrics: tuple[str, ...]
    y_label: str = ""
    log_x: bool = True
    log_y: bool = True
    x_label: str = ""
    labels: tuple[str, ...] = ()
    lines: tuple[tuple[str, ...], ...] = ()
    over: tuple[str, ...] = ()
    most: float | None = None


@dataclass(frozen=True)
class Confusion:
    """A figure of confusion matrices, one per preset, from the matrix ``confusion`` that runs record.

    Row i, column j of the matrix counts the test samples of class i that the run assigns to class j. Runs of a preset
    are summed.

    Attributes:
        classes: Names of the classes, in order; numbers if empty.
    """

    key: str
    title: str
    presets: tuple[str, ...]
    classes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Filters:
    """A figure of a trunk's first convolution: before training, and as each preset left it.

    Runs record the matrices ``filters_before`` and ``filters_after`` with one row per filter: channels x height x
    width, flattened. Filters have three channels (red, green, blue) and are square. The first run of a preset that
    recorded them is drawn; ``filters_before`` comes from the first preset.
    """

    key: str
    title: str
    presets: tuple[str, ...]


Figure: TypeAlias = Curves | Sweep | Confusion | Filters
