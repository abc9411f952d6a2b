"""Group runs by preset, and keep runs with overrides apart from those of the preset itself."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from splitfg_lab.experiments.spec import Experiment, Preset
from splitfg_lab.report._numbers import Summary, summarise
from splitfg_lab.report._times import TIMES
from splitfg_lab.runs.record import RunReport
from splitfg_lab.runs.results import RunRecord

_OF_ONE_METHOD = ("step_ms", "peak_memory_mib", "jvps_per_step", "trunk_backward", "block_backward")
_QUANTITIES = (*_OF_ONE_METHOD, "wall_s", "steps")
_NEVER_ZERO = ("peak_memory_mib", "steps")  # zero means that the run did not measure it


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
    """All runs of one preset: ``runs`` with its config, ``variants`` with overrides; means never mix the two."""

    preset: Preset
    runs: tuple[RunRecord, ...]
    variants: tuple[Variant, ...]


def group_runs(experiment: Experiment, records: Iterable[RunRecord]) -> dict[str, PresetRuns]:
    """Return the runs of an experiment by preset name; presets without runs have an entry too."""
    by_preset: dict[str, list[RunRecord]] = defaultdict(list)
    for record in records:
        if record.report.experiment == experiment.name:
            by_preset[record.report.preset].append(record)
    return {p.name: _group_preset(experiment, p, by_preset[p.name]) for p in experiment.presets}


def metric_summary(runs: Iterable[RunRecord], metric: str) -> Summary:
    """Summarise a metric over runs; a diverged run counts as diverged whatever metrics it recorded."""
    values = (_metric(record.report, metric) for record in runs)
    return summarise(value for value in values if value is not None)


def metric_values(runs: Iterable[RunRecord], metric: str) -> dict[int, float]:
    """Return a metric by seed, of the runs that measured it; NaN where a run diverged."""
    values = {record.report.seed: _metric(record.report, metric) for record in runs}
    return {seed: value for seed, value in values.items() if value is not None}


def quantities(report: RunReport) -> dict[str, float | None]:
    """Return the quantities of a run as a whole.

    A quantity is ``None`` if the run did not measure it, if the run measured several methods, or if it is a time and
    the run did not have its machine alone.
    """
    found = {name: getattr(report, name) for name in _QUANTITIES}
    unmeasured = [name for name in _NEVER_ZERO if found[name] == 0]
    averages = _OF_ONE_METHOD if measured_several(report) else ()
    untimed = () if report.timed_alone else TIMES
    return found | dict.fromkeys((*unmeasured, *averages, *untimed))


def measured_several(report: RunReport) -> bool:
    """Return whether one run measured several methods (``ms/backprop`` and ``ms/frozen``), so averages mean nothing."""
    return len({name.partition("/")[2] for name in report.metrics if "/" in name}) > 1


def _metric(report: RunReport, name: str) -> float | None:
    """Return a metric, or a quantity that every report has, by name; ``None`` if the run did not measure it."""
    if report.status == "diverged":
        return math.nan
    if name == "block_backward" and report.block_backward is None and report.trunk_backward is not None:
        return 0.0  # recorded only where there are any
    return (quantities(report) | report.metrics).get(name)


def _group_preset(experiment: Experiment, preset: Preset, records: list[RunRecord]) -> PresetRuns:
    by_changes: dict[tuple[str, ...], list[RunRecord]] = defaultdict(list)
    for record in sorted(records, key=lambda r: r.report.seed):
        by_changes[experiment.changes(preset, record.report.config)].append(record)
    as_designed = tuple(by_changes.pop((), ()))
    return PresetRuns(preset, as_designed, tuple(Variant(c, tuple(r)) for c, r in sorted(by_changes.items())))
