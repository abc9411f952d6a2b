"""The paper's tables with our numbers in them, as plain text and numbers that every output can print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from splitfg_lab.experiments.spec import Cell, Paired, Paper, Table
from splitfg_lab.report._groups import PresetRuns, Variant, metric_summary
from splitfg_lab.report._numbers import Summary, difference, is_share, measured, number, quoted, signed
from splitfg_lab.report._paired import PairedTest, holm, p_text, paired_test
from splitfg_lab.report._provenance import Provenance, provenance
from splitfg_lab.runs.results import RunRecord

State = Literal["measured", "diverged", "missing", "not run", "text"]
Verdict = Literal["better", "worse", "same", ""]


@dataclass(frozen=True)
class VariantCell:
    """The value of runs made with overrides, and the mark of the footnote that says which."""

    text: str
    mark: str


@dataclass(frozen=True)
class CellView:
    """One cell, ready to print.

    Attributes:
        text: ``61.9 ± 0.3 (5)``, ``+9.4, p = 0.012``, ``not run``, ``diverged``, or what the table itself says.
        state: What kind of cell it is.
        note: What the mean leaves unsaid (``3 of 5 seeds``, ``1 diverged``).
        paper: The paper's value; empty where it prints none.
        difference: Ours minus the paper's; empty where either is missing.
        verdict: Whether ours is better than the paper's, where one of them can be.
        variants: Values from runs made with overrides.
        value: Our mean, to sort and to compare by.
        forward_only: Whether no run behind the value took a reverse-mode pass through the trunk.
        best: Best of all it is compared with.
        best_forward: Best of those with no reverse-mode pass through the trunk.
    """

    text: str
    state: State
    note: str = ""
    paper: str = ""
    difference: str = ""
    verdict: Verdict = ""
    variants: tuple[VariantCell, ...] = ()
    value: float | None = None
    forward_only: bool = False
    best: bool = False
    best_forward: bool = False


@dataclass(frozen=True)
class RowView:
    """A labelled row of cells."""

    label: str
    cells: tuple[CellView, ...]


@dataclass(frozen=True)
class ColumnView:
    """A column's name, and whether it holds measured numbers."""

    name: str
    numeric: bool


@dataclass(frozen=True)
class TableView:
    """A table, its footnotes (mark and text) and what its numbers rest on."""

    table: Table
    columns: tuple[ColumnView, ...]
    rows: tuple[RowView, ...]
    footnotes: tuple[tuple[str, str], ...]
    provenance: Provenance | None


def view_table(table: Table, groups: Mapping[str, PresetRuns]) -> TableView:
    """Fill a table with the runs of its experiment."""
    marks = _marks(table, groups)
    rows = [[_view_cell(cell, table, groups, marks) for cell in row.cells] for row in table.rows]
    for line in _compared_lines(table):
        _mark_best(rows, line, table)
    tests = _fill_tests(rows, table, groups)
    views = tuple(RowView(row.label, tuple(cells)) for row, cells in zip(table.rows, rows, strict=True))
    numeric = {j for row in table.rows for j, cell in enumerate(row.cells) if isinstance(cell, Cell | Paired)}
    columns = tuple(ColumnView(name, j in numeric) for j, name in enumerate(table.columns))
    footnotes = [(mark, f"Run with {', '.join(changes)}.") for changes, mark in marks.items()]
    if tests:
        footnotes.append(("p", _TESTED.format("1 test" if tests == 1 else f"{tests} tests")))
    return TableView(table, columns, views, tuple(footnotes), provenance(_runs_behind(table, groups)))


_TESTED = "Two-sided paired t-test over the seeds both have run, adjusted for the {} of this table by Holm's method."


def _cells(table: Table) -> list[tuple[int, int, Cell]]:
    return [
        (i, j, cell) for i, row in enumerate(table.rows) for j, cell in enumerate(row.cells) if isinstance(cell, Cell)
    ]


def _marks(table: Table, groups: Mapping[str, PresetRuns]) -> dict[tuple[str, ...], str]:
    """One dagger per distinct set of overrides, numbered in the order the table shows them."""
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
    """Put the paired tests in their places; how many there are to correct for."""
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


def _view_cell(
    cell: Cell | Paired | str | None,
    table: Table,
    groups: Mapping[str, PresetRuns],
    marks: Mapping[tuple[str, ...], str],
) -> CellView:
    if isinstance(cell, Paired):
        return CellView("not run", "not run")  # until the tests of the whole table are known
    if not isinstance(cell, Cell):
        return CellView("–" if cell is None else cell, "text")
    group = groups[cell.preset]
    summary = metric_summary(group.runs, cell.metric)
    digits = table.decimals if cell.decimals is None else cell.decimals
    if cell.over is not None:
        view = _view_ratio(_view_value(summary, group, digits), cell.metric, groups[cell.over], digits)
    else:
        variants = tuple(_view_variant(v, cell.metric, digits, marks) for v in group.variants)
        view = replace(_view_value(summary, group, digits), variants=variants)
    return view if cell.paper is None else _beside_paper(view, cell, cell.paper, table, digits)


def _view_value(summary: Summary, group: PresetRuns, decimals: int) -> CellView:
    if not group.runs:
        return CellView("not run", "not run")
    if summary.mean is None:
        return CellView("diverged", "diverged", _note(summary, group)) if summary.diverged else _MISSING
    return CellView(
        measured(summary, decimals),
        "measured",
        _note(summary, group),
        value=summary.mean,
        forward_only=all(run.report.trunk_backward == 0 for run in group.runs),
    )


def _view_ratio(view: CellView, metric: str, other: PresetRuns, decimals: int) -> CellView:
    """The value over another preset's; what keeps either from being there stands in its place."""
    reference = _view_value(metric_summary(other.runs, metric), other, decimals)
    if view.value is None or not reference.value:
        return view if view.value is None else reference
    ratio = view.value / reference.value
    return CellView(number(ratio, decimals), "measured", view.note, value=ratio, forward_only=view.forward_only)


_MISSING = CellView("no value", "missing", "the runs did not report this metric")


def _note(summary: Summary, group: PresetRuns) -> str:
    planned, made = len(group.preset.seeds), len(group.runs)
    missing = made - summary.n - summary.diverged
    parts = [
        f"{summary.diverged} of {made} diverged" if summary.diverged and made > 1 else "",
        f"{missing} without a value" if missing else "",
        f"{made} of {planned} seeds" if made < planned else "",
    ]
    return ", ".join(part for part in parts if part)


def _view_variant(variant: Variant, metric: str, decimals: int, marks: Mapping[tuple[str, ...], str]) -> VariantCell:
    summary = metric_summary(variant.runs, metric)
    absent = "diverged" if summary.diverged else "no value"
    text = absent if summary.mean is None else measured(summary, decimals)
    return VariantCell(text, marks[variant.changes])


def _beside_paper(view: CellView, cell: Cell, paper: Paper, table: Table, decimals: int) -> CellView:
    view = replace(view, paper=quoted(paper, decimals))
    if view.value is None:
        return view
    # a ratio of two shares is no share
    relative = cell.over is not None or not is_share(cell.metric)
    text = difference(view.value, paper, decimals, relative=relative)
    return replace(view, difference=text, verdict=_verdict(view.value, paper.mean, table, decimals))


def _verdict(ours: float, paper: float, table: Table, decimals: int) -> Verdict:
    if table.better is None:
        return ""
    gain = round(ours - paper, decimals)
    if gain == 0:
        return "same"
    return "better" if (gain > 0) == (table.better == "higher") else "worse"


def _compared_lines(table: Table) -> list[list[tuple[int, int]]]:
    """The cells that compete: those of one row or column, or all, and among them only the same metric."""
    lines: dict[tuple[int, str, str | None], list[tuple[int, int]]] = {}
    for i, j, cell in _cells(table):
        line = {"row": i, "column": j, "table": 0}[table.best_in]
        if cell.ranked:
            lines.setdefault((line, cell.metric, cell.over), []).append((i, j))
    return list(lines.values())


def _mark_best(rows: list[list[CellView]], line: Sequence[tuple[int, int]], table: Table) -> None:
    # compared at the precision that is printed: what looks like a tie is one
    cells = {(i, j): rows[i][j] for i, j in line}
    digits = {place: _digits(table, *place) for place in cells}
    values = {place: round(c.value, digits[place]) for place, c in cells.items() if c.value is not None}
    forward = {place: value for place, value in values.items() if cells[place].forward_only}
    for i, j in _winners(values, table):
        rows[i][j] = replace(rows[i][j], best=True)
    for i, j in _winners(forward, table):
        rows[i][j] = replace(rows[i][j], best_forward=True)


def _digits(table: Table, i: int, j: int) -> int:
    cell = table.rows[i].cells[j]
    own = cell.decimals if isinstance(cell, Cell) else None
    return table.decimals if own is None else own


def _winners(values: Mapping[tuple[int, int], float], table: Table) -> list[tuple[int, int]]:
    """Where the best value stands; nobody wins alone."""
    if table.better is None or len(values) < 2:
        return []
    best = max(values.values()) if table.better == "higher" else min(values.values())
    return [place for place, value in values.items() if value == best]
