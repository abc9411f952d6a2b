"""Decide whether the recorded times of runs can be compared."""

from __future__ import annotations

from collections.abc import Sequence

from splitfg_lab.runs.results import RunRecord

TIMES = ("step_ms", "wall_s")
"""Quantities of a report that are times."""


def timing_problems(runs: Sequence[RunRecord]) -> list[str]:
    """Return every reason why the times of these runs cannot be compared; empty if they can."""
    reports = [run.report for run in runs]
    shared = sum(r.side_by_side is not None and r.side_by_side > 1 for r in reports)
    unknown = sum(r.side_by_side is None for r in reports)
    found = [
        f"{shared} of {len(reports)} runs shared their machine with other runs" if shared else "",
        f"{unknown} of {len(reports)} runs did not record whether they had their machine alone" if unknown else "",
        _several("devices", [r.device for r in reports]),
        _several("numbers of CPU threads", [str(r.threads) for r in reports if r.device.startswith("cpu")]),
        _several("torch versions", [r.versions.get("torch", "unknown") for r in reports]),
    ]
    return [reason for reason in found if reason]


def _several(what: str, values: Sequence[str]) -> str:
    distinct = sorted(set(values))
    return f"the runs used several {what} ({', '.join(distinct)})" if len(distinct) > 1 else ""
