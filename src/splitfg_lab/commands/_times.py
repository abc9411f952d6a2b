"""Expected times, from recorded runs of the same presets."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from splitfg_lab.commands._targets import Plan
from splitfg_lab.experiments.spec import identity_in
from splitfg_lab.runs.durations import format_duration
from splitfg_lab.runs.results import read_recorded

_LONG_S = 60.0
"""Shorter times are not announced."""


def recorded_seconds(plans: Sequence[Plan], results: Path) -> list[tuple[float, str] | None]:
    """Return the median seconds and the device of recorded runs, for each plan; ``None`` if there are none.

    A plan with overrides has none: its steps or its model may differ.
    """
    if not any(plan.exact for plan in plans):
        return [None] * len(plans)
    experiments = {plan.experiment.name: plan.experiment for plan in plans}
    found: dict[tuple[str, str], list[tuple[float, str]]] = defaultdict(list)
    for record in read_recorded(results, identity_in(experiments.values())).runs:
        report = record.report
        experiment = experiments.get(report.experiment)
        if experiment is None or report.preset not in {p.name for p in experiment.presets}:
            continue
        if not experiment.changes(experiment.preset(report.preset), report.config):
            found[report.experiment, report.preset].append((report.wall_s, report.device))
    return [_typical(found[plan.experiment.name, plan.preset.name]) if plan.exact else None for plan in plans]


def time_sentence(times: Sequence[tuple[float, str] | None]) -> str:
    """Describe the expected time of runs one after another; empty if it is short or unknown."""
    known = [time for time in times if time is not None]
    seconds = sum(time for time, _ in known)
    if seconds < _LONG_S:
        return ""
    devices = " and ".join(dict.fromkeys(device for _, device in known))
    runs = (
        f"{len(known)} of {len(times)} runs" if len(known) < len(times) else f"{len(times)} run{'s' * (len(times) > 1)}"
    )
    return f"Recorded: {format_duration(seconds)} for {runs}, on {devices}. Expect another time on another machine."


def _typical(runs: Sequence[tuple[float, str]]) -> tuple[float, str] | None:
    if not runs:
        return None
    device = Counter(device for _, device in runs).most_common(1)[0][0]
    return median(seconds for seconds, where in runs if where == device), device
