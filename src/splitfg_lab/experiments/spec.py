"""Experiments as data: presets, the paper's numbers, tables and figures.

This module does not import torch, so listing and reporting start at once.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final

from splitfg_lab.experiments._figure_spec import Confusion, Curves, Figure, Filters, Sweep
from splitfg_lab.experiments._table_spec import SUMMARY_COLUMNS, Cell, Headline, Paired, Paper, Row, Table
from splitfg_lab.runs.config import flatten, to_json
from splitfg_lab.runs.record import RunReport
from splitfg_lab.runs.results import Identity, by_config

__all__ = [
    "SUMMARY_COLUMNS",
    "Cell",
    "Confusion",
    "Curves",
    "Experiment",
    "Figure",
    "Filters",
    "Headline",
    "Paired",
    "Paper",
    "Preset",
    "Row",
    "Sweep",
    "Table",
    "identity_in",
]

_ABSENT: Final = "absent"
_COST: Final = "method.lean"  # a field of Split-FG's recipe that changes cost, not results, in every experiment


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
        note: A sentence on all its tables, which the report prints once, below the title.
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
    note: str = ""

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
