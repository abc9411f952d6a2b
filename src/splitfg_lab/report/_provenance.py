"""The provenance of numbers: runs, seeds, machines, versions, revisions and dates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from splitfg_lab.report._numbers import duration
from splitfg_lab.runs.results import RunRecord


@dataclass(frozen=True)
class Provenance:
    """Facts about a set of runs: ``line`` in one line, ``facts`` as name and text."""

    line: str
    facts: tuple[tuple[str, str], ...]


def provenance(runs: Sequence[RunRecord]) -> Provenance | None:
    """Return the provenance of runs; ``None`` without runs."""
    if not runs:
        return None
    count = f"{len(runs)} run{'s' if len(runs) > 1 else ''}"
    seeds, dates = _ranges(run.report.seed for run in runs), _dates(runs)
    devices, versions = _counted(run.report.device for run in runs), _versions(runs)
    revisions = _counted(_revision(run) for run in runs)
    line = (
        f"{count}, seed{'' if seeds.isdigit() else 's'} {seeds}, {devices}, {dates}, {versions}, revision {revisions}"
    )
    facts = (
        ("Runs", f"{count}, {duration(sum(run.report.wall_s for run in runs))} in all"),
        ("Seeds", seeds),
        ("Device", devices),
        ("Machine", _counted(_sharing(run) for run in runs)),
        ("Dates", dates),
        ("Versions", versions),
        ("Revision", revisions),
        ("Read from", _counted(_source(run) for run in runs)),
    )
    return Provenance(line, facts)


def _revision(run: RunRecord) -> str:
    if run.report.git is None:
        return "unknown"
    return f"{run.report.git[:10]} with local changes" if run.report.git_dirty else run.report.git[:10]


def _sharing(run: RunRecord) -> str:
    count = run.report.side_by_side
    if count is None:
        return "not recorded whether other runs shared it"
    return "one run at a time" if count == 1 else f"shared by {count} runs"


def _source(run: RunRecord) -> str:
    path = Path(run.source)
    return f"{path.parent.name}/{path.name}" if path.suffix == ".json" else "run folders"


def _counted(values: Iterable[str]) -> str:
    """Join distinct values, the most frequent first, each with its count if there are several."""
    counts = Counter(values)
    if len(counts) == 1:
        return next(iter(counts))
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{value} (×{count})" for value, count in ordered)


def _versions(runs: Sequence[RunRecord]) -> str:
    names = dict.fromkeys(name for run in runs for name in run.report.versions)
    distinct = {
        name: sorted({run.report.versions[name] for run in runs if name in run.report.versions}) for name in names
    }
    return ", ".join(f"{name} {' and '.join(values)}" for name, values in distinct.items()) or "unknown"


def _dates(runs: Sequence[RunRecord]) -> str:
    first, last = min(run.report.started for run in runs)[:10], max(run.report.finished for run in runs)[:10]
    return first if first == last else f"{first} to {last}"


def _ranges(numbers: Iterable[int]) -> str:
    """Return ``0-4, 7``: consecutive numbers as ranges."""
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
