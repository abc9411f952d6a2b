"""The report in a terminal: the paper's layout where it fits, one line per number where it does not."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from splitfg.report._costs import CostTable
from splitfg.report._tables import CellView, TableView
from splitfg.report._views import ExperimentView, ReportView

_QUIET = "dim"
_STATES = {"diverged": "red", "missing": "red", "not run": "dim italic"}
_VERDICTS = {"better": "green", "worse": "yellow"}


def render_terminal(report: ReportView, console: Console) -> None:
    """Print every experiment, and what was left out."""
    for view in report.experiments:
        _print_experiment(view, console)
    for problem in report.problems:
        console.print(Text(f"could not be read: {problem}", style="yellow"))
    for run in report.strangers:
        console.print(Text(f"no preset known here: {run.name} ({run.source})", style="yellow"))


def _print_experiment(view: ExperimentView, console: Console) -> None:
    console.rule(Text(view.experiment.title, style="bold"), align="left")
    progress = f"{view.experiment.source}. {view.done} of {view.planned} runs done, {len(view.diverged)} diverged."
    console.print(Text(progress, style=_QUIET))
    for table in view.tables:
        _print_results(table, console)
    if view.costs:
        console.print(_costs(view.costs))
    for name, reason in view.diverged:
        console.print(Text(f"Diverged: {name}. {reason}", style="red"))
    if view.unfinished:
        console.print(Text(f"Started and not finished: {', '.join(view.unfinished)}", style="yellow"))
    if view.not_run:
        console.print(Text(f"Not run yet: {'; '.join(view.not_run)}", style=_QUIET))
    console.print()


def _print_results(view: TableView, console: Console) -> None:
    wide = _as_printed(view)
    fits = Measurement.get(console, console.options.update(width=10_000), wide).maximum <= console.width
    console.print(wide if fits else _one_per_line(view))
    for line in (view.table.note, *(f"{mark} {text}" for mark, text in view.footnotes)):
        if line:
            console.print(Text(line, style=_QUIET))
    if view.provenance:
        console.print(Text(f"Rests on {view.provenance.line}.", style=_QUIET))


def _grid(title: str) -> Table:
    return Table(title=Text(title, style="bold"), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)


def _as_printed(view: TableView) -> Table:
    grid = _grid(_title(view))
    grid.add_column("")
    for column in view.columns:
        grid.add_column(Text(column.name), justify="right" if column.numeric else "left", no_wrap=True)
    for row in view.rows:
        grid.add_row(Text(row.label), *(_stacked(cell) for cell in row.cells))
    return grid


def _one_per_line(view: TableView) -> Table:
    grid = _grid(_title(view))
    grid.add_column("")
    for name in ("ours", "paper", "difference"):
        grid.add_column(name, justify="right", no_wrap=True)
    for row in view.rows:
        grid.add_row(Text(row.label, style="bold"))
        for column, cell in zip(view.columns, row.cells, strict=True):
            said = Text(f"  {column.name}").append(f"\n  {cell.note}" if cell.note else "", style=_QUIET)
            difference = Text(cell.difference, style=_VERDICTS.get(cell.verdict, _QUIET))
            grid.add_row(said, _ours(cell), Text(cell.paper, style=_QUIET), difference)
        grid.add_section()
    return grid


def _title(view: TableView) -> str:
    return f"{view.table.title} ({view.table.better} is better)" if view.table.better else view.table.title


def _stacked(cell: CellView) -> Text:
    text = _ours(cell)
    for line in (cell.note, f"paper {cell.paper}" if cell.paper else ""):
        if line:
            text.append(f"\n{line}", style=_QUIET)
    if cell.difference:
        text.append(f"\n{cell.difference}", style=_VERDICTS.get(cell.verdict, _QUIET))
    return text


def _ours(cell: CellView) -> Text:
    style = "bold green" if cell.best_forward else "bold" if cell.best else _STATES.get(cell.state, "")
    text = Text(cell.text, style=style)
    for variant in cell.variants:
        text.append(f"\n{variant.text} {variant.mark}", style=_QUIET)
    return text


def _costs(table: CostTable) -> Table:
    grid = _grid(f"Cost. {table.note}")
    grid.add_column("")
    for column in table.columns:
        grid.add_column(column, justify="right")
    for row in table.rows:
        label = "\n".join([row.label, *(f"† {change}" for change in row.changes)])
        grid.add_row(Text(label), *(Text(cell.text) for cell in row.cells))
    return grid
