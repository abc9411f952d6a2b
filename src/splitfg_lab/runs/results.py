"""Results that travel: finished runs in one small file per experiment, and read back with run folders.

``results/<experiment>.json`` holds what each run's ``report.json`` says and a thinned learning curve, in an
order that does not depend on when a run was added, so that the file can be tracked and its changes read.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, Literal, Protocol

from splitfg_lab.runs._errors import ConfigError, RunError
from splitfg_lab.runs._metrics import read_metrics
from splitfg_lab.runs.config import from_json, to_json
from splitfg_lab.runs.folder import RunFolder, find_folders
from splitfg_lab.runs.names import natural
from splitfg_lab.runs.record import RunReport
from splitfg_lab.runs.storage import locked, make_folder, read_json, write_atomic

MOST_POINTS: Final = 200
"""How many points of a learning curve are recorded."""


@dataclass(frozen=True)
class RunRecord:
    """A finished run: its report, its learning curve (``step``, ``wall_s``, metrics) and where it was read from."""

    report: RunReport
    curve: tuple[dict[str, float], ...]
    source: str

    @property
    def name(self) -> str:
        """``experiment/preset/seed0``."""
        return f"{self.report.experiment}/{self.report.preset}/seed{self.report.seed}"


@dataclass(frozen=True)
class Problem:
    """A file that could not be read, and why."""

    path: str
    reason: str


@dataclass(frozen=True)
class Records:
    """Everything that was found.

    Attributes:
        runs: Finished runs, each once.
        unfinished: Names of runs that were started and have not ended.
        problems: What could not be read.
    """

    runs: tuple[RunRecord, ...]
    unfinished: tuple[str, ...]
    problems: tuple[Problem, ...]


class Identity(Protocol):
    """Which runs of one preset and seed stand for the same number, and which of them is taken for it."""

    def __call__(self, report: RunReport) -> Hashable:
        """What is equal for runs that stand for the same number."""

    def closeness(self, report: RunReport) -> tuple[bool, ...]:
        """How well a run stands for it: the greatest is taken, and of equals the one that finished last."""


def by_config(report: RunReport) -> str:
    """The whole config as text, the same however its numbers were written: ``1`` or ``1.0``."""
    return json.dumps(_plain_numbers(report.config), sort_keys=True)


def read_records(runs: Path, results: Path, identity: Identity | None = None) -> Records:
    """Read the run folders under ``runs`` and the results files under ``results``; either may be missing.

    Of runs with the same config the one that finished last is taken; a run found in both places is taken from its
    folder. With an ``identity``, one run is given for each number it tells apart. What cannot be read, or lies in a
    results file of another name than its experiment's, stops nothing else.
    """
    folders = find_folders(runs)
    problems: list[Problem] = []
    files = sorted(results.glob("*.json"))
    recorded = [run for path in files for run in _attempt(path, _read_own, problems)]
    local = [run for f in folders if f.finished for run in _attempt(f.path, _read_finished, problems)]
    merged = _merge(recorded, local)
    if identity is not None:
        merged = _chosen(merged, identity)
    unfinished = tuple(f.name for f in folders if not f.finished)
    return Records(tuple(merged), unfinished, tuple(problems))


def add_results(folders: Iterable[RunFolder], results: Path, *, files: Iterable[Path] = ()) -> list[Path]:
    """Fold finished runs into ``results/<experiment>.json``, replacing older ones of the same config.

    Args:
        folders: Run folders.
        results: Where the results files are.
        files: Results files from elsewhere, whose runs are folded in too.

    Returns:
        The files written.

    Raises:
        RunError: A run is not finished or cannot be read, or a results file is damaged; nothing is written.
    """
    return add_records([*(r for path in files for r in read_results(path)), *map(read_record, folders)], results)


def add_records(records: Iterable[RunRecord], results: Path) -> list[Path]:
    """Fold runs into ``results/<experiment>.json``; the files written.

    Runs are the same where preset, seed and the whole config are; the one that finished last is kept.

    Raises:
        RunError: A results file is damaged, and nothing is written; or it cannot be written.
    """
    by_experiment: dict[str, list[RunRecord]] = defaultdict(list)
    for record in records:
        by_experiment[record.report.experiment].append(replace(record, curve=thin(record.curve)))
    added = {results / f"{name}.json": new for name, new in by_experiment.items()}
    make_folder(results)
    with locked(results, wait=True):  # others may add at the same time
        merged = {path: _merge(_read_own(path), new) for path, new in added.items()}
        for path, runs in merged.items():
            write_atomic(path, _encoded(path.stem, runs))
    return list(merged)


def collect(folders: Iterable[RunFolder], files: Iterable[Path]) -> tuple[list[RunRecord], list[Problem]]:
    """The runs in results files and in folders of finished runs, and what of these could not be read."""
    problems: list[Problem] = []
    records = [run for path in files for run in _attempt(path, read_results, problems)]
    records += [run for folder in folders for run in _attempt(folder.path, _read_finished, problems)]
    return records, problems


def read_record(folder: RunFolder) -> RunRecord:
    """A finished run from its folder.

    Raises:
        RunError: It is not finished, or its files cannot be read.
    """
    if not folder.finished:
        raise RunError(f"{folder.path} is not finished: splitfg resume {folder.path}")
    return RunRecord(folder.report(), read_metrics(folder.metrics_path), "run folders")


def read_results(path: Path) -> list[RunRecord]:
    """The runs recorded in a results file; none if there is no such file.

    Raises:
        RunError: It is damaged or foreign; the error lists everything that is wrong.
    """
    return _runs_of(_parse(path), path) if path.exists() else []


def thin(curve: Sequence[dict[str, float]], most: int = MOST_POINTS) -> tuple[dict[str, float], ...]:
    """At most ``most`` points of a curve, first and last among them, rounded to six digits.

    Lines with different metrics share the allowance, so that rare evaluations survive among many losses.
    """
    kinds: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for i, point in enumerate(curve):
        kinds[tuple(sorted(point))].append(i)
    allowance = max(1, most // max(1, len(kinds)))
    kept = sorted(i for places in kinds.values() for i in _spread(places, allowance))
    return tuple({k: _six_digits(v) for k, v in curve[i].items() if not k.startswith("norm/")} for i in kept[-most:])


@dataclass(frozen=True)
class _RecordedRun(RunReport):
    """A run in a results file: its report and, with the same standing, its curve, in which steps stay whole."""

    curve: tuple[dict[str, int | float], ...] = ()


@dataclass(frozen=True)
class _ResultsFile:
    schema: Literal[1]
    experiment: str
    runs: tuple[_RecordedRun, ...]

    def __post_init__(self) -> None:
        others = sorted({run.experiment for run in self.runs} - {self.experiment})
        if others:
            raise ValueError(f"it is the results file of {self.experiment!r}, but holds runs of {', '.join(others)}")


def _parse(path: Path) -> _ResultsFile:
    data = read_json(path)
    try:
        return from_json(_ResultsFile, data)
    except ConfigError as error:
        raise ConfigError(error.problems, what=str(path)) from None


def _runs_of(file: _ResultsFile, path: Path) -> list[RunRecord]:
    source = f"{path.parent.name}/{path.name}"
    return [RunRecord(_report_of(run), run.curve, source) for run in file.runs]


def _read_own(path: Path) -> list[RunRecord]:
    """The runs of a file in the results folder; none if there is no such file.

    Raises:
        RunError: It is damaged, or not named after its experiment: a backup, say, which must not take its place.
    """
    if not path.exists():
        return []
    file = _parse(path)
    if path.stem != file.experiment:
        raise RunError(
            f"{path} holds results of {file.experiment!r}, which belong in {file.experiment}.json: not read."
            f" `splitfg results add {path}` folds its runs in; delete or move it otherwise."
        )
    return _runs_of(file, path)


def _report_of(run: _RecordedRun) -> RunReport:
    return RunReport(**{f.name: getattr(run, f.name) for f in fields(RunReport)})


def _attempt(path: Path, read: Callable[[Path], list[RunRecord]], problems: list[Problem]) -> Iterator[RunRecord]:
    try:
        yield from read(path)
    except RunError as error:
        problems.append(Problem(str(path), str(error)))


def _read_finished(path: Path) -> list[RunRecord]:
    return [read_record(RunFolder(path))]


def _merge(old: Iterable[RunRecord], new: Iterable[RunRecord]) -> list[RunRecord]:
    """Both, by preset, seed and config, in an order that depends on nothing else.

    Of equals the one that finished last is kept, and the new one if they finished together.
    """
    runs = {(r.name, by_config(r.report)): r for r in sorted([*old, *new], key=_finished)}
    return sorted(runs.values(), key=lambda run: (natural(run.name), by_config(run.report)))


def _chosen(runs: Sequence[RunRecord], identity: Identity) -> list[RunRecord]:
    """One run for each number, in the order of ``runs``."""
    ranked = sorted(runs, key=lambda run: (identity.closeness(run.report), _finished(run)))
    taken = {(run.name, identity(run.report)): run for run in ranked}
    return [run for run in runs if taken[run.name, identity(run.report)] is run]


def _finished(run: RunRecord) -> str:
    return run.report.finished


def _plain_numbers(value: Any) -> Any:
    """JSON in which whole numbers are ints."""
    if isinstance(value, dict):
        return {name: _plain_numbers(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_plain_numbers(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _encoded(experiment: str, records: Sequence[RunRecord]) -> bytes:
    """The results file: a run a line, so that files stay small and a changed run is one changed line."""
    lines = ",\n".join(json.dumps(_recorded(r), allow_nan=False) for r in records)
    return f'{{"schema": 1, "experiment": {json.dumps(experiment)}, "runs": [\n{lines}\n]}}\n'.encode()


def _recorded(run: RunRecord) -> dict[str, Any]:
    return to_json(run.report) | {"curve": list(run.curve)}


def _spread(places: Sequence[int], most: int) -> list[int]:
    if len(places) <= most:
        return list(places)
    if most == 1:
        return [places[-1]]
    return [places[round(i * (len(places) - 1) / (most - 1))] for i in range(most)]


def _six_digits(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.6g}")
