"""Step times that other runs measured, for curves over time."""

from __future__ import annotations

from collections.abc import Mapping

from splitfg_lab.experiments.spec import Curves
from splitfg_lab.report._groups import PresetRuns, metric_summary
from splitfg_lab.report._provenance import provenance
from splitfg_lab.report._times import timing_problems
from splitfg_lab.runs.results import RunRecord


def step_times(figure: Curves, groups: Mapping[str, PresetRuns]) -> dict[str, float]:
    """Return the milliseconds of a step by preset, for the presets that were timed."""
    timed = [(name, cell) for name, cell in figure.step_ms if cell.preset in groups]
    found = {name: metric_summary(groups[cell.preset].runs, cell.metric).mean for name, cell in timed}
    return {name: ms for name, ms in found.items() if ms is not None}


def step_time_problems(figure: Curves, groups: Mapping[str, PresetRuns]) -> list[str]:
    """Return every reason why the step times of a figure are missing or cannot be compared; empty if there is none."""
    sources = _sources(figure)
    absent = [f"{source} is not part of this report" for source in sources if source not in groups]
    unrun = [f"{source} was not run" for source in sources if source in groups and not groups[source].runs]
    if absent or unrun:
        return absent + unrun
    runs = _runs(figure, groups)
    # the times of one run come from one machine
    return timing_problems(runs) if len(runs) > 1 else []


def step_time_note(figure: Curves, groups: Mapping[str, PresetRuns]) -> str:
    """Return where the step times of a figure come from, and what they leave out."""
    runs = _runs(figure, groups)
    known = provenance(runs)
    assert known is not None
    facts = dict(known.facts)
    torch = runs[0].report.versions.get("torch", "unknown")
    measured = ", ".join((facts["Device"], facts["Machine"], f"torch {torch}", facts["Dates"]))
    return (
        f"Time is the number of steps times the step time in {' and '.join(_sources(figure))} ({measured})."
        " Evaluation and compilation are not counted."
    )


def _sources(figure: Curves) -> list[str]:
    return list(dict.fromkeys(cell.preset for _, cell in figure.step_ms))


def _runs(figure: Curves, groups: Mapping[str, PresetRuns]) -> list[RunRecord]:
    return [run for source in _sources(figure) for run in groups[source].runs]
