"""Runs by preset: those made as the preset says and, kept apart, those made with something changed."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from splitfg.experiments.spec import Experiment, Preset
from splitfg.report._numbers import Summary, summarise
from splitfg.runs.record import RunReport
from splitfg.runs.results import RunRecord

_QUANTITIES = ("step_ms", "peak_memory_mib", "jvps_per_step", "trunk_backward", "wall_s", "steps")


@dataclass(frozen=True)
class Variant:
    """Runs of a preset whose config differs from it, all in the same way.

    Attributes:
        changes: The differences, as ``K=4 (preset: 8)``.
        runs: The runs, by seed.
    """

    changes: tuple[str, ...]
    runs: tuple[RunRecord, ...]


@dataclass(frozen=True)
class PresetRuns:
    """All runs of one preset: ``runs`` as it says, ``variants`` with overrides; never mixed into one mean."""

    preset: Preset
    runs: tuple[RunRecord, ...]
    variants: tuple[Variant, ...]


def group_runs(experiment: Experiment, records: Iterable[RunRecord]) -> dict[str, PresetRuns]:
    """The runs of an experiment by preset name; every preset has an entry, run or not."""
    by_preset: dict[str, list[RunRecord]] = defaultdict(list)
    for record in records:
        if record.report.experiment == experiment.name:
            by_preset[record.report.preset].append(record)
    return {p.name: _group_preset(experiment, p, by_preset[p.name]) for p in experiment.presets}


def metric_summary(runs: Iterable[RunRecord], metric: str) -> Summary:
    """A metric over runs; a diverged run counts as diverged whatever numbers it left behind."""
    values = (_metric(record.report, metric) for record in runs)
    return summarise(value for value in values if value is not None)


def metric_values(runs: Iterable[RunRecord], metric: str) -> dict[int, float]:
    """A metric by seed, of the runs that measured it; NaN where a run diverged."""
    values = {record.report.seed: _metric(record.report, metric) for record in runs}
    return {seed: value for seed, value in values.items() if value is not None}


def _metric(report: RunReport, name: str) -> float | None:
    """A metric by its name, or a quantity that every report has; ``None`` if the run did not measure it."""
    if report.status == "diverged":
        return math.nan
    measured = {quantity: getattr(report, quantity) for quantity in _QUANTITIES} | report.metrics
    return measured.get(name)


def _group_preset(experiment: Experiment, preset: Preset, records: list[RunRecord]) -> PresetRuns:
    by_changes: dict[tuple[str, ...], list[RunRecord]] = defaultdict(list)
    for record in sorted(records, key=lambda r: r.report.seed):
        by_changes[experiment.changes(preset, record.report.config)].append(record)
    as_designed = tuple(by_changes.pop((), ()))
    return PresetRuns(preset, as_designed, tuple(Variant(c, tuple(r)) for c, r in sorted(by_changes.items())))
