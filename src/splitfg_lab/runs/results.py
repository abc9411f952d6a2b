"""Recorded results: finished runs in one small file per experiment.

``results/<experiment>.json`` holds the ``report.json`` of each run and a thinned learning curve, with the parts that
many runs share written once. Its order does not depend on when a run was added, so version control shows small changes.
``splitfg results add results/*.json`` rewrites files of an earlier format.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol

from splitfg_lab.runs._errors import ConfigError, RunError
from splitfg_lab.runs._metrics import read_metrics
from splitfg_lab.runs._results_file import decode, encode
from splitfg_lab.runs.digests import canonical
from splitfg_lab.runs.folder import RunFolder, find_folders
from splitfg_lab.runs.names import natural
from splitfg_lab.runs.record import RunReport
from splitfg_lab.runs.storage import locked, make_folder, read_json, write_atomic

MOST_POINTS: Final = 200
"""Points of a learning curve that are recorded."""


@dataclass(frozen=True)
class RunRecord:
    """A finished run: its report, its learning curve (``step``, ``wall_s``, metrics) and the file it comes from."""

    report: RunReport
    curve: tuple[dict[str, float], ...]
    source: str

    @property
    def name(self) -> str:
        """``experiment/preset/seed0``."""
        return f"{self.report.experiment}/{self.report.preset}/seed{self.report.seed}"


@dataclass(frozen=True)
class Problem:
    """A file that cannot be read, and the reason."""

    path: str
    reason: str


@dataclass(frozen=True)
class Records:
    """The runs under a folder of runs and a folder of results.

    Attributes:
        runs: Finished runs, each once.
        unfinished: Names of runs that have begun and not finished.
        problems: Files that cannot be read.
    """

    runs: tuple[RunRecord, ...]
    unfinished: tuple[str, ...]
    problems: tuple[Problem, ...]


class Identity(Protocol):
    """Groups the runs of one preset and seed that measure the same number, and ranks the runs of a group."""

    def __call__(self, report: RunReport) -> Hashable:
        """Return a key that is equal for runs of the same group."""

    def closeness(self, report: RunReport) -> tuple[bool, ...]:
        """Return the rank of a run; the greatest represents its group, and of equals the one that finished last."""


def by_config(report: RunReport) -> str:
    """Return the whole config as text that does not depend on ``1`` against ``1.0``."""
    return canonical(report.config)


def read_records(runs: Path, results: Path, identity: Identity | None = None) -> Records:
    """Read the run folders under ``runs`` and the results files under ``results``; either may be missing.

    Of runs with the same config, keeps the one that finished last; of equals the one in a run folder. With an
    ``identity``, returns one run for each of its groups. Files that cannot be read, or whose name is not that of their
    experiment, are listed as problems.
    """
    recorded, local = read_recorded(results), read_local(runs)
    merged = _merge(recorded.runs, local.runs)
    return Records(_chosen(merged, identity), local.unfinished, (*recorded.problems, *local.problems))


def read_recorded(results: Path, identity: Identity | None = None) -> Records:
    """Read the results files under ``results`` alone."""
    problems: list[Problem] = []
    found = [run for path in sorted(results.glob("*.json")) for run in _attempt(path, _read_own, problems)]
    return Records(_chosen(_merge(found, []), identity), (), tuple(problems))


def read_local(runs: Path, identity: Identity | None = None) -> Records:
    """Read the run folders under ``runs`` alone."""
    folders = find_folders(runs)
    problems: list[Problem] = []
    found = [run for f in folders if f.finished for run in _attempt(f.path, _read_finished, problems)]
    unfinished = tuple(f.name for f in folders if not f.finished)
    return Records(_chosen(_merge([], found), identity), unfinished, tuple(problems))


def add_results(folders: Iterable[RunFolder], results: Path, *, files: Iterable[Path] = ()) -> list[Path]:
    """Add finished runs to ``results/<experiment>.json``, replacing older ones of the same config.

    Args:
        folders: Run folders.
        results: The folder of results files.
        files: Results files from other machines, whose runs are added too.

    Returns:
        The files written.

    Raises:
        RunError: A run is not finished or cannot be read, or a results file is damaged; no file is written.
    """
    return add_records([*(r for path in files for r in read_results(path)), *map(read_record, folders)], results)


def add_records(records: Iterable[RunRecord], results: Path) -> list[Path]:
    """Add runs to ``results/<experiment>.json`` and return the files written.

    Of runs with the same preset, seed and config, keeps the one that finished last. The curve of a run that shared its
    machine is recorded without seconds, which reports do not show.

    Raises:
        RunError: A results file is damaged, and no file is written; or a file cannot be written.
    """
    by_experiment: dict[str, list[RunRecord]] = defaultdict(list)
    for record in records:
        by_experiment[record.report.experiment].append(replace(record, curve=_recorded_curve(record)))
    added = {results / f"{name}.json": new for name, new in by_experiment.items()}
    make_folder(results)
    with locked(results, wait=True):  # other processes may add at the same time
        merged = {path: _merge(_read_own(path), new) for path, new in added.items()}
        for path, runs in merged.items():
            write_atomic(path, encode(path.stem, ((run.report, run.curve) for run in runs)))
    return list(merged)


def collect(folders: Iterable[RunFolder], files: Iterable[Path]) -> tuple[list[RunRecord], list[Problem]]:
    """Read the runs in results files and run folders, and list those that cannot be read."""
    problems: list[Problem] = []
    records = [run for path in files for run in _attempt(path, read_results, problems)]
    records += [run for folder in folders for run in _attempt(folder.path, _read_finished, problems)]
    return records, problems


def read_record(folder: RunFolder) -> RunRecord:
    """Read a finished run from its folder.

    Raises:
        RunError: The run is not finished, or its files cannot be read.
    """
    if not folder.finished:
        raise RunError(f"{folder.path} is not finished: splitfg resume {folder.path}")
    return RunRecord(folder.report(), read_metrics(folder.metrics_path), "run folders")


def read_results(path: Path) -> list[RunRecord]:
    """Read the runs of a results file; none if there is no such file.

    Raises:
        RunError: The file is damaged or of another format; the error lists every problem.
    """
    return _parse(path)[1] if path.exists() else []


def thin(curve: Sequence[dict[str, float]], most: int = MOST_POINTS) -> tuple[dict[str, float], ...]:
    """Keep at most ``most`` points of a curve, with the first and the last, rounded to six digits.

    Points with different metrics share the allowance, so that rare evaluations survive among many losses.
    """
    kinds: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for i, point in enumerate(curve):
        kinds[tuple(sorted(point))].append(i)
    allowance = max(1, most // max(1, len(kinds)))
    kept = sorted(i for places in kinds.values() for i in _spread(places, allowance))
    return tuple({k: _six_digits(v) for k, v in curve[i].items() if not k.startswith("norm/")} for i in kept[-most:])


def _parse(path: Path) -> tuple[str, list[RunRecord]]:
    """Return the experiment of a results file and its runs."""
    data = read_json(path)
    try:
        experiment, runs = decode(data)
    except ConfigError as error:
        raise ConfigError(error.problems, what=str(path)) from None
    source = f"{path.parent.name}/{path.name}"
    return experiment, [RunRecord(report, curve, source) for report, curve in runs]


def _read_own(path: Path) -> list[RunRecord]:
    """Read a file in the results folder; none if there is no such file.

    Raises:
        RunError: The file is damaged, or is not named after its experiment, as a backup would be.
    """
    if not path.exists():
        return []
    experiment, runs = _parse(path)
    if path.stem != experiment:
        raise RunError(
            f"{path} holds results of {experiment!r}, which belong in {experiment}.json: skipped."
            f" Add its runs with `splitfg results add {path}`, or move the file out of this folder."
        )
    return runs


def _attempt(path: Path, read: Callable[[Path], list[RunRecord]], problems: list[Problem]) -> Iterator[RunRecord]:
    try:
        yield from read(path)
    except RunError as error:
        problems.append(Problem(str(path), str(error)))


def _read_finished(path: Path) -> list[RunRecord]:
    return [read_record(RunFolder(path))]


def _merge(old: Iterable[RunRecord], new: Iterable[RunRecord]) -> list[RunRecord]:
    """Merge runs by preset, seed and config, in an order that depends on these alone.

    Of equals, keeps the one that finished last, and the new one if they finished together.
    """
    runs = {(r.name, by_config(r.report)): r for r in sorted([*old, *new], key=_finished)}
    return sorted(runs.values(), key=lambda run: (natural(run.name), by_config(run.report)))


def _chosen(runs: Sequence[RunRecord], identity: Identity | None) -> tuple[RunRecord, ...]:
    """Return the best run of each group, in the order of ``runs``; all runs without an identity."""
    if identity is None:
        return tuple(runs)
    ranked = sorted(runs, key=lambda run: (identity.closeness(run.report), _finished(run)))
    taken = {(run.name, identity(run.report)): run for run in ranked}
    return tuple(run for run in runs if taken[run.name, identity(run.report)] is run)


def _finished(run: RunRecord) -> str:
    return run.report.finished


def _recorded_curve(run: RunRecord) -> tuple[dict[str, float], ...]:
    """Thin a curve, and leave out its seconds unless the run had its machine alone, as reports do."""
    unused = () if run.report.timed_alone else ("wall_s",)
    return tuple({k: v for k, v in point.items() if k not in unused} for point in thin(run.curve))


def _spread(places: Sequence[int], most: int) -> list[int]:
    if len(places) <= most:
        return list(places)
    if most == 1:
        return [places[-1]]
    return [places[round(i * (len(places) - 1) / (most - 1))] for i in range(most)]


def _six_digits(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.6g}")
