"""The cost of training: step time, peak memory, JVPs and reverse passes, one row per preset and device."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from splitfg_lab.report._groups import PresetRuns, measured_several, quantities
from splitfg_lab.report._numbers import Summary, duration, significant, summarise
from splitfg_lab.runs.results import RunRecord

_QUANTITIES = {
    "step_ms": "Step (ms)",
    "peak_memory_mib": "Peak memory (MiB)",
    "jvps_per_step": "JVPs per step",
    "trunk_backward": "Reverse passes through the trunk",
    "block_backward": "Reverse passes inside blocks",
    "steps": "Steps",
    "wall_s": "Wall time",
}
_COLUMNS = (*_QUANTITIES.values(), "Runs")
_ALONE = (
    "Times are those of runs that shared their machine with no other run, each in its own process; other programs on"
    " the machine are not recorded."
)
_NOT_ALONE = "Times are left out of runs that shared their machine or did not record that they had it alone."
_SEVERAL = "The cost of each method that a run measured is in the tables."
NOT_MEASURED = "–"
Place: TypeAlias = tuple[str, str]
"""A device and its kind of memory."""
_MOST_OPEN = 12


@dataclass(frozen=True)
class CostCell:
    """A printed quantity and the number to sort by; ``None`` for words and for quantities not measured."""

    text: str
    value: float | None = None

    @property
    def is_words(self) -> bool:
        """Whether it holds words, not a quantity."""
        return self.value is None and self.text != NOT_MEASURED


@dataclass(frozen=True)
class CostRow:
    """The cost of one preset on one device; ``changes`` lists its overrides."""

    label: str
    changes: tuple[str, ...]
    cells: tuple[CostCell, ...]


@dataclass(frozen=True)
class CostTable:
    """The cost of an experiment's runs; ``note`` holds for all rows."""

    columns: tuple[str, ...]
    rows: tuple[CostRow, ...]
    note: str

    @property
    def is_long(self) -> bool:
        """Whether pages fold it."""
        return len(self.rows) > _MOST_OPEN

    @property
    def summary(self) -> str:
        """A line for a page that folds it."""
        return f"{len(self.rows)} rows: time, memory, JVPs and reverse passes per step"


def view_costs(groups: Mapping[str, PresetRuns]) -> CostTable | None:
    """Return the cost of all runs, devices and overrides kept apart; ``None`` if there are no runs."""
    parts = [
        (group.preset.title, changes, same_place)
        for group in groups.values()
        for changes, runs in (((), group.runs), *((v.changes, v.runs) for v in group.variants))
        for same_place in _by_place(runs)
    ]
    if not parts:
        return None
    places = dict.fromkeys(_place(runs[0]) for _, _, runs in parts)
    names = {} if len(places) == 1 else _names(places)
    rows = [CostRow(label, changes, _cells(runs, names)) for label, changes, runs in parts]
    columns = (*_COLUMNS, "Where") if names else _COLUMNS
    table = _without_empty_columns(CostTable(columns, tuple(rows), ""))
    return replace(table, note=_note(table.rows, [run for _, _, runs in parts for run in runs], places))


def _without_empty_columns(table: CostTable) -> CostTable:
    kept = [j for j in range(len(table.columns)) if any(row.cells[j].text != NOT_MEASURED for row in table.rows)]
    rows = tuple(replace(row, cells=tuple(row.cells[j] for j in kept)) for row in table.rows)
    return replace(table, columns=tuple(table.columns[j] for j in kept), rows=rows)


def _names(places: Collection[Place]) -> dict[Place, str]:
    """Return the names of places: that of the device, with the kind of memory where a device has several kinds."""
    devices = [device for device, _ in places]
    return {place: place[0] if devices.count(place[0]) == 1 else _in_full(place) for place in places}


def _in_full(place: Place) -> str:
    return f"{place[0]}, memory: {place[1]}"


def _note(rows: Iterable[CostRow], runs: Sequence[RunRecord], places: Collection[Place]) -> str:
    alone = [run.report.timed_alone for run in runs]
    sentences = (
        f"{'All on ' if len(places) == 1 else ''}{'; '.join(map(_in_full, places))}.",
        _ALONE if any(alone) else "",
        "" if all(alone) else _NOT_ALONE,
        f"{NOT_MEASURED}: not measured." if any(c.text == NOT_MEASURED for row in rows for c in row.cells) else "",
        _SEVERAL if any(measured_several(run.report) for run in runs) else "",
    )
    return " ".join(sentence for sentence in sentences if sentence)


def _place(run: RunRecord) -> Place:
    """Return the device and its kind of memory: neither times nor memory compare across these."""
    return run.report.device, run.report.memory_kind


def _by_place(runs: Iterable[RunRecord]) -> list[list[RunRecord]]:
    places: dict[Place, list[RunRecord]] = {}
    for run in runs:
        places.setdefault(_place(run), []).append(run)
    return list(places.values())


def _cells(runs: list[RunRecord], names: Mapping[Place, str]) -> tuple[CostCell, ...]:
    measured = [quantities(run.report) for run in runs]
    cells = (
        *(_quantity(name, [found[name] for found in measured]) for name in _QUANTITIES),
        CostCell(str(len(runs)), len(runs)),
    )
    return (*cells, CostCell(names[_place(runs[0])])) if names else cells


def _quantity(name: str, values: Iterable[float | None]) -> CostCell:
    summary = summarise(value for value in values if value is not None)
    if summary.mean is None:
        return CostCell(NOT_MEASURED)
    text = duration(summary.mean) if name == "wall_s" else _text(summary, summary.mean)
    return CostCell(text, summary.mean)


def _text(summary: Summary, mean: float) -> str:
    text = f"{mean:,.0f}" if mean == round(mean) else significant(mean)
    return f"{text} ± {significant(summary.std, 2)}" if summary.std else text
