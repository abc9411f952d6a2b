"""What training cost: step time, peak memory, JVPs and reverse passes, one row per preset and device."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from splitfg_lab.report._groups import PresetRuns, measured_several, quantities
from splitfg_lab.report._numbers import Summary, duration, significant, summarise
from splitfg_lab.runs.results import RunRecord

_QUANTITIES = {
    "step_ms": "Step (ms)",
    "peak_memory_mib": "Peak memory (MiB)",
    "jvps_per_step": "JVPs per step",
    "trunk_backward": "Reverse passes through the trunk",
    "steps": "Steps",
}
_COLUMNS = (*_QUANTITIES.values(), "Wall time", "Runs")
_AS_IT_WAS = "Times are as each run had them, alone on its device or beside others: they compare no methods."
_SEVERAL = "Where a run measured several methods, what each of them cost is in the tables."
NOT_MEASURED = "–"


@dataclass(frozen=True)
class CostCell:
    """A printed quantity, and the number it is sorted by; words, or nothing measured, where that is ``None``."""

    text: str
    value: float | None = None

    @property
    def is_words(self) -> bool:
        """Whether it holds no quantity at all."""
        return self.value is None and self.text != NOT_MEASURED


@dataclass(frozen=True)
class CostRow:
    """What one preset cost on one device; ``changes`` names the overrides it was run with."""

    label: str
    changes: tuple[str, ...]
    cells: tuple[CostCell, ...]


@dataclass(frozen=True)
class CostTable:
    """The cost of an experiment's runs; ``note`` says what all rows have in common."""

    columns: tuple[str, ...]
    rows: tuple[CostRow, ...]
    note: str


def view_costs(groups: Mapping[str, PresetRuns]) -> CostTable | None:
    """The cost of everything that ran, devices and overrides kept apart; ``None`` if nothing did."""
    parts = [
        (group.preset.title, changes, same_place)
        for group in groups.values()
        for changes, runs in (((), group.runs), *((v.changes, v.runs) for v in group.variants))
        for same_place in _by_place(runs)
    ]
    if not parts:
        return None
    places = dict.fromkeys(_place(runs[0]) for _, _, runs in parts)
    alike = len(places) == 1
    rows = tuple(CostRow(label, changes, _cells(runs, with_place=not alike)) for label, changes, runs in parts)
    columns = _COLUMNS if alike else (*_COLUMNS, "Where")
    return CostTable(columns, rows, _note(rows, [run for _, _, runs in parts for run in runs], places))


def _note(rows: Iterable[CostRow], runs: Iterable[RunRecord], places: Collection[str]) -> str:
    sentences = (
        f"All on {next(iter(places))}." if len(places) == 1 else "",
        _AS_IT_WAS,
        f"{NOT_MEASURED}: not measured." if any(c.text == NOT_MEASURED for row in rows for c in row.cells) else "",
        _SEVERAL if any(measured_several(run.report) for run in runs) else "",
    )
    return " ".join(sentence for sentence in sentences if sentence)


def _place(run: RunRecord) -> str:
    """The device, and what memory means there: neither time nor memory compares across these."""
    return f"{run.report.device}, memory: {run.report.memory_kind}"


def _by_place(runs: Iterable[RunRecord]) -> list[list[RunRecord]]:
    places: dict[str, list[RunRecord]] = {}
    for run in runs:
        places.setdefault(_place(run), []).append(run)
    return list(places.values())


def _cells(runs: list[RunRecord], *, with_place: bool) -> tuple[CostCell, ...]:
    wall_s = sum(run.report.wall_s for run in runs) / len(runs)
    measured = [quantities(run.report) for run in runs]
    cells = (
        *(_quantity(found[name] for found in measured) for name in _QUANTITIES),
        CostCell(duration(wall_s), wall_s),
        CostCell(str(len(runs)), len(runs)),
    )
    return (*cells, CostCell(_place(runs[0]))) if with_place else cells


def _quantity(values: Iterable[float | None]) -> CostCell:
    summary = summarise(value for value in values if value is not None)
    return CostCell(NOT_MEASURED) if summary.mean is None else CostCell(_text(summary, summary.mean), summary.mean)


def _text(summary: Summary, mean: float) -> str:
    text = f"{mean:,.0f}" if mean == round(mean) else significant(mean)
    return f"{text} ± {significant(summary.std, 2)}" if summary.std else text
