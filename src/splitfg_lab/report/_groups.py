"""Runs by preset: those made as the preset says and, kept apart, those made with something changed."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from splitfg_lab.experiments.spec import Experiment, Preset
from splitfg_lab.report._numbers import Summary, summarise
from splitfg_lab.runs.record import RunReport
from splitfg_lab.runs.results import RunRecord

_OF_ONE_METHOD = ("step_ms", "peak_memory_mib", "jvps_per_step", "trunk_backward")
_QUANTITIES = (*_OF_ONE_METHOD, "wall_s", "steps")
_NEVER_ZERO = ("peak_memory_mib", "steps")  # of a run that measured them


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


def quantities(report: RunReport) -> dict[str, float | None]:
    """What a report says of its run as a whole; ``None`` where nobody measured it, or where it belongs to no method."""
    found = {name: getattr(report, name) for name in _QUANTITIES}
    unmeasured = [name for name in _NEVER_ZERO if found[name] == 0]
    averages = _OF_ONE_METHOD if measured_several(report) else ()
    return found | dict.fromkeys((*unmeasured, *averages))


def measured_several(report: RunReport) -> bool:
    """Whether one run measured several methods (``ms/backprop`` and ``ms/frozen``): averages over them say nothing."""
    return len({name.partition("/")[2] for name in report.metrics if "/" in name}) > 1


def _metric(report: RunReport, name: str) -> float | None:
    """A metric by its name, or a quantity that every report has; ``None`` if the run did not measure it."""
    if report.status == "diverged":
        return math.nan
    return (quantities(report) | report.metrics).get(name)


def _group_preset(experiment: Experiment, preset: Preset, records: list[RunRecord]) -> PresetRuns:
    by_changes: dict[tuple[str, ...], list[RunRecord]] = defaultdict(list)
    for record in sorted(records, key=lambda r: r.report.seed):
        by_changes[experiment.changes(preset, record.report.config)].append(record)
    as_designed = tuple(by_changes.pop((), ()))
    return PresetRuns(preset, as_designed, tuple(Variant(c, tuple(r)) for c, r in sorted(by_changes.items())))
