"""The paper's tables filled with our numbers, as data that every output can print."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from splitfg_lab.experiments.spec import Cell, Paired, Table
from splitfg_lab.report._best import mark_best
from splitfg_lab.report._cell_view import CellView, view_cell
from splitfg_lab.report._collapse import DASH, ColumnView, LeftOut, RowView, collapse
from splitfg_lab.report._groups import PresetRuns
from splitfg_lab.report._numbers import signed
from splitfg_lab.report._paired import PairedTest, holm, p_text, paired_test
from splitfg_lab.report._provenance import Provenance, provenance
from splitfg_lab.runs.results import RunRecord

PINNED = "Split-FG"


@dataclass(frozen=True)
class TableView:
    """A table ready to print.

    Attributes:
        footnotes: Marks and texts.
        provenance: Of its numbers; ``None`` if nothing of it was run.
        left_out: Rows and columns of the table that are not among these.
    """

    table: Table
    columns: tuple[ColumnView, ...]
    rows: tuple[RowView, ...]
    footnotes: tuple[tuple[str, str], ...]
    provenance: Provenance | None
    left_out: tuple[LeftOut, ...] = ()


def view_table(table: Table, groups: Mapping[str, PresetRuns]) -> TableView:
    """Fill a table with the runs of its experiment."""
    marks = _marks(table, groups)
    rows = [[_view(cell, table, groups, marks) for cell in row.cells] for row in table.rows]
    mark_best(rows, table)
    tests = _fill_tests(rows, table, groups)
    views = tuple(RowView(row.label, tuple(cells)) for row, cells in zip(table.rows, rows, strict=True))
    columns = _columns(table)
    left_out: tuple[LeftOut, ...] = ()
    if table.collapse:
        columns, views, left_out = collapse(columns, views, table.fewest)
    footnotes = [(mark, f"Run with {', '.join(changes)}.") for changes, mark in marks.items()]
    if tests:
        footnotes.append(("p", _TESTED.format("1 test" if tests == 1 else f"{tests} tests")))
    return TableView(table, columns, views, tuple(footnotes), provenance(_runs_behind(table, groups)), left_out)


def _columns(table: Table) -> tuple[ColumnView, ...]:
    words = {j for row in table.rows for j, cell in enumerate(row.cells) if isinstance(cell, str)}
    own = [name for name in table.columns if name.startswith(PINNED)]
    pinned = own if len(own) == 1 else []
    return tuple(ColumnView(name, j not in words, name in pinned) for j, name in enumerate(table.columns))


_TESTED = "Two-sided paired t-test over the seeds both have run, adjusted for the {} of this table by Holm's method."


def _cells(table: Table) -> list[tuple[int, int, Cell]]:
    return [
        (i, j, cell) for i, row in enumerate(table.rows) for j, cell in enumerate(row.cells) if isinstance(cell, Cell)
    ]


def _marks(table: Table, groups: Mapping[str, PresetRuns]) -> dict[tuple[str, ...], str]:
    """Number the distinct sets of overrides, one dagger each, in the order of the table."""
    variants = [v for _, _, cell in _cells(table) if cell.over is None for v in groups[cell.preset].variants]
    distinct = dict.fromkeys(v.changes for v in variants)
    return {changes: f"†{i}" for i, changes in enumerate(distinct, start=1)}


def _runs_behind(table: Table, groups: Mapping[str, PresetRuns]) -> list[RunRecord]:
    shown = dict.fromkeys(name for _, _, cell in _cells(table) for name in (cell.preset, cell.over) if name)
    tested = dict.fromkeys(name for _, _, cell in _tests(table) for name in (cell.preset, cell.against))
    everything = [groups[p].runs for p in {**shown, **tested}]
    values = dict.fromkeys(cell.preset for _, _, cell in _cells(table) if cell.over is None)
    everything += [variant.runs for p in values for variant in groups[p].variants]
    return [run for runs in everything for run in runs]


def _tests(table: Table) -> list[tuple[int, int, Paired]]:
    return [
        (i, j, cell) for i, row in enumerate(table.rows) for j, cell in enumerate(row.cells) if isinstance(cell, Paired)
    ]


def _fill_tests(rows: list[list[CellView]], table: Table, groups: Mapping[str, PresetRuns]) -> int:
    """Fill in the paired tests; return how many there are to correct for."""
    made = [(i, j, cell, paired_test(cell, groups)) for i, j, cell in _tests(table)]
    p_values = {(i, j): test.p for i, j, _, test in made if test is not None and test.p is not None}
    adjusted = dict(zip(p_values, holm(list(p_values.values())), strict=True))
    for i, j, cell, test in made:
        planned = len(groups[cell.preset].preset.seeds)
        digits = table.decimals if cell.decimals is None else cell.decimals
        if test is not None:
            rows[i][j] = _view_test(test, adjusted.get((i, j)), planned, digits)
    return len(adjusted)


def _view_test(test: PairedTest, p: float | None, planned: int, decimals: int) -> CellView:
    lead = signed(test.lead, decimals)
    if test.t is None or p is None:
        return CellView(lead, "measured", f"{test.n} of {planned} seeds, no test", value=test.lead)
    notes = [f"t({test.n - 1}) = {signed(test.t, 1)}", f"{test.n} of {planned} seeds" if test.n < planned else ""]
    return CellView(f"{lead}, {p_text(p)}", "measured", ", ".join(note for note in notes if note), value=test.lead)


def _view(
    cell: Cell | Paired | str | None,
    table: Table,
    groups: Mapping[str, PresetRuns],
    marks: Mapping[tuple[str, ...], str],
) -> CellView:
    if isinstance(cell, Cell):
        return view_cell(cell, table, groups, marks)
    if isinstance(cell, Paired):
        return CellView("not run", "not run")  # until the tests of the whole table are known
    return CellView(DASH if cell is None else cell, "text")
