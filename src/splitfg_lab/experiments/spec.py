"""Experiments as data: presets, the paper's numbers, tables and figures.

This module does not import torch, so listing and reporting start at once.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final, Literal, TypeAlias

from splitfg_lab.runs.config import flatten, to_json
from splitfg_lab.runs.record import RunReport
from splitfg_lab.runs.results import Identity, by_config

_ABSENT: Final = "absent"
_COST: Final = "method.lean"  # a field of Split-FG's recipe that changes cost, not results, in every experiment


@dataclass(frozen=True)
class Paper:
    """A number of the paper, with its standard deviation if the paper gives one."""

    mean: float
    std: float | None = None


@dataclass(frozen=True)
class Preset:
    """A config with a name, and the seeds of its recorded runs.

    Attributes:
        name: Short name, unique within its experiment (``c500``, ``adult-split_fg``).
        title: A short description.
        config: A frozen dataclass for the experiment's runner; it does not import torch.
        seeds: Seeds of the recorded result.
        counts: Whether it is a count model. Count models have no trunk, so a report never marks one as the best
            method without a backward pass.
    """

    name: str
    title: str
    config: Any
    seeds: tuple[int, ...] = (0,)
    counts: bool = False


@dataclass(frozen=True)
class Cell:
    """One measured number of a table: a preset, a metric of its report, and the paper's value.

    ``preset`` is one of the table's own experiment, or another experiment's as ``EXPERIMENT/PRESET``. ``decimals``
    overrides the table's digits after the point. With ``over``, the number is the ratio of the means of this preset and
    that one. A cell that is not ``ranked`` takes no part in marking the best number.
    """

    preset: str
    metric: str
    paper: Paper | None = None
    decimals: int | None = None
    over: str | None = None
    ranked: bool = True


@dataclass(frozen=True)
class Paired:
    """A paired t-test of a table: the lead of one preset over another, on the seeds of both.

    The p-values of a table are corrected for the number of its tests.

    Attributes:
        preset: The preset that leads.
        against: The preset it is compared with.
        metric: The metric to compare.
        better: The direction that is better.
        decimals: Digits of the lead after the point; ``None`` for the table's.
    """

    preset: str
    against: str
    metric: str
    better: Literal["lower", "higher"]
    decimals: int | None = None


@dataclass(frozen=True)
class Row:
    """A labelled row. A string cell is printed unchanged; ``None`` means that the method does not apply."""

    label: str
    cells: tuple[Cell | Paired | str | None, ...]


@dataclass(frozen=True)
class Table:
    """A table of the paper: ``columns`` name the cells of every row.

    Attributes:
        better: The direction that is better, for highlighting; ``None`` to highlight nothing.
        best_in: Where the best cell is marked: in each row (methods side by side), in each column, or in the whole
            table (a grid of settings).
        decimals: Digits after the point.
        collapse: Leave out rows and columns of which nothing was run, and list them in a footnote.
    """

    key: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    better: Literal["lower", "higher"] | None = None
    best_in: Literal["row", "column", "table"] = "column"
    decimals: int = 1
    note: str = ""
    collapse: bool = False


@dataclass(frozen=True)
class Curves:
    """A figure of a metric over training: one line per preset, mean over seeds.

    Attributes:
        x: ``step``, or ``wall_s`` for seconds. A report draws a figure over seconds only if every run had its machine
            to itself and all ran on one kind of device.
        references: Horizontal lines: label and value.
        y_label: Words for the metric; the report has defaults for common metrics.
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


@dataclass(frozen=True)
class Sweep:
    """A figure of final metrics against a config field: one line per metric, one point per preset.

    ``field`` is a dotted path into the config (``classes``, ``optimizer.rho``); ``labels`` name the lines.

    Attributes:
        lines: Presets of every line, where several share one metric; ``presets`` then lists all of them.
        over: Presets whose values divide those of the lines at the same value of the field.
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


SUMMARY_COLUMNS: Final = ("Backprop", "Frozen trunk", "Pure FG", "Split-FG", "Beyond the paper")
"""The columns of a report's summary."""


@dataclass(frozen=True)
class Headline:
    """A row of the report's summary: one task under several methods.

    Attributes:
        label: The task and the metric with its unit.
        cells: Cells by column, of :data:`SUMMARY_COLUMNS`.
        better: Which way is better.
        beyond: Which method is in the column ``Beyond the paper``.
        decimals: Digits after the point.
    """

    label: str
    cells: Mapping[str, Cell]
    better: Literal["lower", "higher"]
    beyond: str = ""
    decimals: int = 1

    def __post_init__(self) -> None:
        unknown = [name for name in self.cells if name not in SUMMARY_COLUMNS]
        if unknown:
            raise ValueError(f"no column {', '.join(unknown)} in the summary; columns: {', '.join(SUMMARY_COLUMNS)}")


@dataclass(frozen=True)
class Experiment:
    """One table or figure of the paper.

    Attributes:
        name: Folder name under ``experiments/``.
        title: A short description.
        source: The place in the paper (``Table 7, Appendix B``), or ``New here``.
        runner: ``module:function`` that runs one preset; imported only to run.
        presets: Its presets.
        tables: Its tables.
        figures: Its figures.
        smoke: Overrides under which each of its presets takes a few steps, for tests and ``--smoke``.
        immaterial: Fields, earlier ones included, that change the cost of a run but not its result: a run that differs
            in these fields alone is a run of the preset.
        earlier: Fields added later, with the values they implicitly had before, for configs recorded then. In
            ``method:SplitFGMethod.K`` the method must be a ``SplitFGMethod``.
        no_checkpoints: Patterns of presets that write no checkpoints: an interrupted run of these starts over.
        headlines: Its rows in the report's summary.
    """

    name: str
    title: str
    source: str
    runner: str
    presets: tuple[Preset, ...]
    tables: tuple[Table, ...] = ()
    figures: tuple[Figure, ...] = ()
    smoke: tuple[str, ...] = ("steps=2",)
    immaterial: tuple[str, ...] = ()
    earlier: tuple[tuple[str, Any], ...] = ()
    headlines: tuple[Headline, ...] = ()
    no_checkpoints: tuple[str, ...] = ()

    def resumes(self, preset: Preset) -> bool:
        """Return whether an interrupted run of a preset resumes; otherwise it starts over."""
        return not any(fnmatchcase(preset.name, pattern) for pattern in self.no_checkpoints)

    def preset(self, name: str) -> Preset:
        """Return the preset of that name."""
        return next(p for p in self.presets if p.name == name)

    def changes(self, preset: Preset, recorded: Mapping[str, Any]) -> tuple[str, ...]:
        """List where a recorded config differs from its preset's, as ``optimizer.lr=0.1 (preset: 0.03)``."""
        return tuple(str(d) for d in self._departures(preset, recorded) if not self._is_immaterial(d.field))

    def overrides(self, preset: Preset, recorded: Mapping[str, Any]) -> tuple[str, ...]:
        """List the :meth:`changes` and the immaterial fields with other values, but not added or removed ones."""
        found = self._departures(preset, recorded)
        return tuple(str(d) for d in found if not (self._is_immaterial(d.field) and d.came_or_went))

    def closeness(self, preset: Preset, recorded: Mapping[str, Any]) -> tuple[bool, bool]:
        """Return whether no immaterial field has another value than the preset's, and whether none came or went.

        Runs without :meth:`changes` are runs of the preset; the closest represents it.
        """
        found = [d for d in self._departures(preset, recorded) if self._is_immaterial(d.field)]
        return all(d.came_or_went for d in found), not found

    def completed(self, recorded: Mapping[str, Any]) -> dict[str, Any]:
        """Return a config's JSON with the fields of ``earlier`` that it lacks."""
        filled = dict(recorded)
        for name, value in self.earlier:
            _fill(filled, name.split("."), value)
        return filled

    def _departures(self, preset: Preset, recorded: Mapping[str, Any]) -> list[_Departure]:
        expected, actual = dict(flatten(to_json(preset.config))), dict(flatten(self.completed(recorded)))
        names = dict.fromkeys([*expected, *actual])
        sides = (_Departure(name, expected.get(name, _ABSENT), actual.get(name, _ABSENT)) for name in names)
        return [side for side in sides if side.ours != side.theirs]

    def _is_immaterial(self, field: str) -> bool:
        return field in self.immaterial or field.endswith(_COST)


@dataclass(frozen=True)
class _Departure:
    """A field in which a run differs from its preset."""

    field: str
    ours: Any
    theirs: Any

    @property
    def came_or_went(self) -> bool:
        return _ABSENT in (self.ours, self.theirs)

    def __str__(self) -> str:
        return f"{self.field}={self.theirs} (preset: {self.ours})"


def _fill(data: dict[str, Any], path: list[str], value: Any) -> None:
    """Set a missing nested field if its parent exists; copy inner objects instead of changing them."""
    (first, _, kind), *rest = (part.partition(":") for part in path)
    inner = data.get(first)
    if not rest:
        data.setdefault(first, value)
    elif isinstance(inner, Mapping) and kind in ("", inner.get("type")):
        data[first] = dict(inner)
        _fill(data[first], path[1:], value)


def identity_in(experiments: Iterable[Experiment]) -> Identity:
    """Group the runs of a preset and seed by their changes to the preset.

    A run whose immaterial fields equal the preset's represents its group, if there is one.
    """
    return _PresetIdentity({(e.name, p.name): (e, p) for e in experiments for p in e.presets})


@dataclass(frozen=True)
class _PresetIdentity:
    presets: Mapping[tuple[str, str], tuple[Experiment, Preset]]

    def __call__(self, report: RunReport) -> Hashable:
        found = self.presets.get((report.experiment, report.preset))
        return by_config(report) if found is None else found[0].changes(found[1], report.config)

    def closeness(self, report: RunReport) -> tuple[bool, ...]:
        found = self.presets.get((report.experiment, report.preset))
        return () if found is None else found[0].closeness(found[1], report.config)
