"""The summary at the top of the report: one row per headline, methods side by side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from splitfg_lab.experiments.spec import SUMMARY_COLUMNS, Experiment, Headline, Row, Table
from splitfg_lab.report._cell_view import CellView
from splitfg_lab.report._groups import PresetRuns
from splitfg_lab.report._table_view import view_table


@dataclass(frozen=True)
class SummaryRow:
    """One headline, filled.

    Attributes:
        experiment: The name of its experiment.
        label: The task and the metric.
        cells: One cell per column of the summary.
        better: Which way is better.
        beyond: The method in the last column.
    """

    experiment: str
    label: str
    cells: tuple[CellView, ...]
    better: str
    beyond: str


def view_summary(parts: Iterable[tuple[Experiment, Mapping[str, PresetRuns]]]) -> tuple[SummaryRow, ...]:
    """Fill the headlines of experiments; headlines without any run are left out."""
    rows = (_view(e.name, headline, groups) for e, groups in parts for headline in e.headlines)
    return tuple(row for row in rows if any(cell.value is not None for cell in row.cells))


def _view(experiment: str, headline: Headline, groups: Mapping[str, PresetRuns]) -> SummaryRow:
    row = Row(headline.label, tuple(headline.cells.get(column) for column in SUMMARY_COLUMNS))
    table = Table("summary", "", SUMMARY_COLUMNS, (row,), headline.better, "row", headline.decimals)
    # runs with overrides have no footnote here
    cells = tuple(replace(cell, variants=()) for cell in view_table(table, groups).rows[0].cells)
    return SummaryRow(experiment, headline.label, cells, headline.better, headline.beyond)
