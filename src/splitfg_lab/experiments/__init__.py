"""Experiments: one folder per table or figure of the paper, each with its presets and the paper's numbers.

Every folder ``experiments/<name>/`` exposes ``EXPERIMENT``. Other packages add experiments with an entry point of the
group ``splitfg_lab.experiments`` that names an :class:`Experiment`::

    [project.entry-points."splitfg_lab.experiments"]
    my_experiment = "my_package.my_experiment:EXPERIMENT"

This package does not import torch; an experiment's runner is imported only to run.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import re
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from typing import TYPE_CHECKING

from splitfg_lab.experiments.spec import (
    Cell,
    Confusion,
    Curves,
    Experiment,
    Figure,
    Filters,
    Headline,
    Paired,
    Paper,
    Preset,
    Row,
    Sweep,
    Table,
)
from splitfg_lab.runs.names import is_plain

if TYPE_CHECKING:
    EXPERIMENTS: tuple[Experiment, ...]
    """All experiments, in the order of the paper."""

__all__ = [
    "EXPERIMENTS",
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
]


def __getattr__(name: str) -> tuple[Experiment, ...]:
    # found on first use: a plug-in imports this package before the package can import the plug-in
    if name == "EXPERIMENTS":
        return _experiments()
    raise AttributeError(f"module 'splitfg_lab.experiments' has no attribute {name!r}")


@functools.cache
def _experiments() -> tuple[Experiment, ...]:
    found = sorted([*_shipped(), *_plugged_in()], key=_place_in_paper)
    problems = [*_twice(e.name for e in found), *(p for e in found for p in _wrong_names(e))]
    if problems:
        raise ValueError("experiments need unique names that can be folders:\n" + "\n".join(problems))
    return tuple(found)


_SECTION = re.compile(r"Sections? (\d+(?:\.\d+)*)")
_TABLE = re.compile(r"Tables? (\d+)")


def _place_in_paper(experiment: Experiment) -> tuple[bool, tuple[int, ...], int, str]:
    """Sort key: the paper's experiments by the first section and table they name, then everything new."""
    section, table = _SECTION.search(experiment.source), _TABLE.search(experiment.source)
    is_new = section is None or experiment.source.startswith("New here")
    numbers = tuple(map(int, section[1].split("."))) if section else ()
    return is_new, numbers, int(table[1]) if table else 1000, experiment.name


def _shipped() -> Iterator[Experiment]:
    for module in pkgutil.iter_modules(__path__):
        if module.ispkg:
            yield importlib.import_module(f"{__name__}.{module.name}").EXPERIMENT


def _plugged_in() -> Iterator[Experiment]:
    for entry in metadata.entry_points(group="splitfg_lab.experiments"):
        experiment = entry.load()
        if not isinstance(experiment, Experiment):
            raise TypeError(
                f"the entry point {entry.name} = {entry.value} of {entry.dist} must be an"
                f" Experiment, got {type(experiment).__name__}"
            )
        yield experiment


def _twice(names: Iterator[str]) -> list[str]:
    return [
        f"  {count} experiments or presets are called {name}" for name, count in Counter(names).items() if count > 1
    ]


def _wrong_names(experiment: Experiment) -> list[str]:
    """List names that cannot be folders; ``+`` is not allowed, it separates a preset from its overrides."""
    names = [experiment.name, *(p.name for p in experiment.presets)]
    wrong = [n for n in names if not is_plain(n)]
    return [f"  {experiment.name}: {n!r} needs letters, digits, _ . = or - only" for n in wrong] + _twice(
        f"{experiment.name}/{p.name}" for p in experiment.presets
    )
