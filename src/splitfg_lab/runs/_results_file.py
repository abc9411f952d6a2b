"""The format of a results file: one line per run, and a table for each part that many runs share.

Runs of one preset share their settings, runs of one session their environment, and most curves their steps. A table
stores each such part once, under the first digits of its SHA-256, and runs refer to it:

.. code-block:: text

    {"schema": 2, "experiment": "demo",
    "environments": {"4b0c…": {"versions": …, "git": …, "device": …}},
    "settings": {"91de…": {"config": …, "config_digest": …, "data_digests": …}},
    "columns": {"77aa…": [10, 20, 30]},
    "runs": [{"preset": …, "seed": 0, …, "environment": "4b0c…", "settings": "91de…", "curve": {"step": "77aa…", …}}]}

A key depends on the content alone, so that a new run does not change the lines of others. Fields at their defaults are
left out. Schema 1, the format before, has every part inside each run; :func:`decode` reads both.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, Final, Literal, TypeAlias

from splitfg_lab.runs._errors import ConfigError
from splitfg_lab.runs.config import from_json, to_json
from splitfg_lab.runs.record import RunReport

Curve: TypeAlias = tuple[dict[str, float], ...]
"""A learning curve by points: ``step``, ``wall_s`` and the metrics measured there."""

_PARTS: Final = {
    "environment": ("versions", "git", "git_dirty", "device", "threads", "memory_kind"),
    "settings": ("config", "config_digest", "data_digests"),
}
"""Fields of a report that runs share, by the name under which a run refers to them."""

_TABLES: Final = {"environment": "environments", "settings": "settings"}

_STEP: Final = "step"
"""The column of a curve that runs share."""


def encode(experiment: str, runs: Iterable[tuple[RunReport, Curve]]) -> bytes:
    """Write the runs of an experiment as a results file; :func:`decode` returns them unchanged."""
    tables: dict[str, dict[str, Any]] = {"environments": {}, "settings": {}, "columns": {}}
    lines = [_compact(_lean(report, curve, tables)) for report, curve in runs]
    opening = f'{{"schema": 2, "experiment": {json.dumps(experiment)},\n'
    shared = "".join(f'"{name}": {{\n{_rows(table)}\n}},\n' for name, table in tables.items())
    return (opening + shared + '"runs": [\n' + ",\n".join(lines) + "\n]}\n").encode()


def decode(data: Any) -> tuple[str, list[tuple[RunReport, Curve]]]:
    """Return the experiment of a results file and its runs.

    Raises:
        ConfigError: The file is damaged or of another format; the error lists every problem.
    """
    lean = isinstance(data, Mapping) and data.get("schema") == 2
    file = from_json(_ResultsFile, _expanded(from_json(_LeanFile, data)) if lean else data)
    return file.experiment, [(_report_of(run), run.points()) for run in file.runs]


@dataclass(frozen=True)
class _RecordedRun(RunReport):
    """A run with all its parts: the fields of its report, and its curve, in which steps stay integers.

    A curve is written by columns, which takes a third of the space; the earliest files have it by points.
    """

    curve: tuple[dict[str, int | float], ...] | dict[str, tuple[int | float | None, ...]] = ()

    def points(self) -> Curve:
        """Return the curve by points; a metric is left out of points at which it was not measured."""
        if isinstance(self.curve, tuple):
            return self.curve
        rows = zip(*self.curve.values(), strict=True)
        return tuple({k: v for k, v in zip(self.curve, row, strict=True) if v is not None} for row in rows)


@dataclass(frozen=True)
class _ResultsFile:
    """Schema 1, and schema 2 with its references resolved."""

    schema: Literal[1, 2]
    experiment: str
    runs: tuple[_RecordedRun, ...]

    def __post_init__(self) -> None:
        others = sorted({run.experiment for run in self.runs} - {self.experiment})
        if others:
            raise ValueError(f"this results file of {self.experiment!r} holds runs of {', '.join(others)}")


@dataclass(frozen=True)
class _LeanFile:
    """Schema 2 as it is written."""

    schema: Literal[2]
    experiment: str
    environments: dict[str, dict[str, Any]]
    settings: dict[str, dict[str, Any]]
    columns: dict[str, tuple[int | float, ...]]
    runs: tuple[dict[str, Any], ...]


def _lean(report: RunReport, curve: Curve, tables: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return a run with references in place of its shared parts, which are added to ``tables``."""
    values = to_json(report)
    run = {f.name: values[f.name] for f in fields(report) if not _is_default(f, values[f.name])}
    del run["experiment"]
    for part, names in _PARTS.items():
        shared = {name: run.pop(name) for name in names if name in run}
        run[part] = _reference(shared, tables[_TABLES[part]])
    return run | {"curve": _columns(curve, tables["columns"])}


def _columns(curve: Curve, table: dict[str, Any]) -> dict[str, Any]:
    names = dict.fromkeys(name for point in curve for name in point)
    columns: dict[str, Any] = {name: [point.get(name) for point in curve] for name in names}
    if None not in columns.get(_STEP, [None]):
        columns[_STEP] = _reference(columns[_STEP], table)
    return columns


def _reference(value: Any, table: dict[str, Any]) -> str:
    """Add a value to a table and return its key."""
    key = hashlib.sha256(_compact(value).encode()).hexdigest()[:12]
    table[key] = value
    return key


def _expanded(file: _LeanFile) -> dict[str, Any]:
    """Return schema 2 with its references resolved.

    Raises:
        ConfigError: The tables do not have what runs refer to; the error lists every such reference.
    """
    problems: list[str] = []
    tables = {"environment": file.environments, "settings": file.settings}
    runs = [_resolved(run, tables, file, f"runs[{i}]", problems) for i, run in enumerate(file.runs)]
    if problems:
        raise ConfigError(problems)
    return {"schema": file.schema, "experiment": file.experiment, "runs": runs}


def _resolved(
    run: Mapping[str, Any],
    tables: Mapping[str, Mapping[str, Any]],
    file: _LeanFile,
    at: str,
    problems: list[str],
) -> dict[str, Any]:
    whole: dict[str, Any] = {"experiment": file.experiment} | {k: v for k, v in run.items() if k not in tables}
    for part, table in tables.items():
        whole |= _found(run.get(part), table, f"{at}.{part}", problems) or {}
    curve = whole.get("curve")
    if isinstance(curve, Mapping) and isinstance(curve.get(_STEP), str):
        steps = _found(curve[_STEP], file.columns, f"{at}.curve.{_STEP}", problems)
        whole["curve"] = {**curve, _STEP: steps}
    return whole


def _found(key: Any, table: Mapping[str, Any], at: str, problems: list[str]) -> Any:
    if not isinstance(key, str) or key not in table:
        problems.append(f"{at}: the tables of this file have no entry {key!r}")
        return None
    return table[key]


def _report_of(run: _RecordedRun) -> RunReport:
    return RunReport(**{f.name: getattr(run, f.name) for f in fields(RunReport)})


def _is_default(field: Field[Any], value: Any) -> bool:
    default = field.default_factory() if field.default_factory is not MISSING else field.default
    return default is not MISSING and type(value) is type(default) and bool(value == default)


def _rows(table: Mapping[str, Any]) -> str:
    return ",\n".join(f'"{key}": {_compact(table[key])}' for key in sorted(table))


def _compact(value: Any | Sequence[Any]) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))
