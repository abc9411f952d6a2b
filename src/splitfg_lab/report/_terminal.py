"""The report in a terminal: the paper's layout if it fits, one line per number otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.rule import Rule
from rich.table import Table as Grid
from rich.text import Text

from splitfg_lab.experiments.spec import SUMMARY_COLUMNS, Table
from splitfg_lab.report._cell_view import CellView
from splitfg_lab.report._collapse import ColumnView, RowView
from splitfg_lab.report._costs import CostRow, CostTable
from splitfg_lab.report._summary import SummaryRow
from splitfg_lab.report._table_view import TableView
from splitfg_lab.report._views import ExperimentView, ReportView

_NO_LIMIT = 100_000
_RULE_WIDTH = 100
_WORDS_WIDTH = 20  # words in fewer columns than this are hard to read
_FEW = 6  # titles of presets that fit into a line or two
_QUIET = "dim"
_STATES = {"diverged": "red", "missing": "red", "not run": "dim italic"}
_VERDICTS = {"better": "green", "worse": "yellow"}


def report_console() -> Console:
    """Return a console on the standard output: as wide as its terminal, without a limit for files and pipes."""
    console = Console()
    return console if console.is_terminal else Console(width=_NO_LIMIT)


def render_terminal(report: ReportView, console: Console) -> None:
    """Print the summary, every experiment with runs, the names of the others, and everything left out."""
    if len(report.experiments) > 1:
        _print_summary(report.summary, console)
    not_run = []
    for view in report.experiments:
        if _has_runs(view) or len(report.experiments) == 1:
            _print_experiment(view, console)
        else:
            not_run.append(view.experiment.name)
    if not_run:
        console.print(Text(f"Not run yet: {', '.join(not_run)}. `splitfg run EXPERIMENT` runs one.", style=_QUIET))
    for problem in report.problems:
        console.print(Text(f"could not be read: {problem}", style="yellow"))
    for run in report.strangers:
        console.print(Text(f"no preset known here: {run.name} ({run.source})", style="yellow"))


def _print_summary(rows: Sequence[SummaryRow], console: Console) -> None:
    if not rows:
        return
    heading = Text("Summary", style="bold")
    console.print(Rule(heading, align="left"), width=min(console.width, _RULE_WIDTH))
    columns = tuple(ColumnView(name, numeric=True) for name in SUMMARY_COLUMNS)
    table = Table("summary", "Headline results", SUMMARY_COLUMNS, ())
    labelled = tuple(RowView(f"{row.label} ({row.better} is better)", row.cells) for row in rows)
    _print_filled(TableView(table, columns, labelled, (), None), console)
    beyond = {row.beyond: [r.label for r in rows if r.beyond == row.beyond] for row in rows if row.beyond}
    for method, labels in beyond.items():
        console.print(Text(f"Beyond the paper: {method}. In: {'; '.join(labels)}.", style=_QUIET))
    console.print()


def _has_runs(view: ExperimentView) -> bool:
    filled = any(table.provenance for table in view.tables)  # perhaps with numbers of another experiment
    return filled or bool(view.unfinished) or len(view.not_run) < len(view.experiment.presets)


def _print_experiment(view: ExperimentView, console: Console) -> None:
    rule = Rule(Text(view.experiment.title, style="bold"), align="left")
    console.print(rule, width=min(console.width, _RULE_WIDTH))
    progress = f"{view.experiment.source}. {view.done} of {view.planned} runs done, {len(view.diverged)} diverged."
    console.print(Text(progress, style=_QUIET))
    if view.experiment.note:
        console.print(Text(view.experiment.note, style=_QUIET))
    for table in view.tables:
        _print_results(table, console)
    if view.costs:
        _print_costs(view.costs, console)
    for name, reason in view.diverged:
        console.print(Text(f"Diverged: {name}. {reason}", style="red"))
    if view.unfinished:
        console.print(Text(f"Started and not finished: {', '.join(view.unfinished)}", style="yellow"))
    if view.not_run:
        console.print(Text(_not_run(view), style=_QUIET))
    console.print()


def _not_run(view: ExperimentView) -> str:
    """Return the titles of presets without runs if they are few, otherwise their number."""
    if len(view.not_run) <= _FEW:
        return f"Not run yet: {'; '.join(view.not_run)}"
    name, presets = view.experiment.name, len(view.experiment.presets)
    return f"{len(view.not_run)} of {presets} presets not run yet: splitfg ls {name} lists them"


def _print_results(view: TableView, console: Console) -> None:
    if view.provenance is None:
        console.print(Text(f"{view.table.title}: not run yet.", style=_STATES["not run"]))
    else:
        _print_filled(view, console)


def _print_filled(view: TableView, console: Console) -> None:
    wide, narrow = _as_printed(view), _one_per_line(view)
    if _widths(wide, console).maximum <= console.width:
        console.print(wide)
    else:
        console.print(narrow if _widths(narrow, console).minimum <= console.width else _one_per_block(view))
    footnotes = (f"{mark} {text}" for mark, text in view.footnotes)
    for line in (view.table.note, *footnotes, *(left_out.line for left_out in view.left_out)):
        if line:
            console.print(Text(line, style=_QUIET))
    if view.provenance:
        console.print(Text(f"Runs behind these numbers: {view.provenance.line}.", style=_QUIET))


def _print_costs(table: CostTable, console: Console) -> None:
    wide = _costs(table)
    console.print(wide if _widths(wide, console).minimum <= console.width else _one_cost_per_line(table))


def _widths(grid: Grid, console: Console) -> Measurement:
    """Measure the least width in which no number is cut off, and the width in which nothing wraps."""
    return Measurement.get(console, console.options.update(width=_NO_LIMIT), grid)


def _grid(title: str) -> Grid:
    return Grid(title=Text(title, style="bold"), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)


def _add_words(grid: Grid, texts: Iterable[Text], heading: str = "") -> None:
    """Add a column whose texts wrap where there is no room for them."""
    grid.add_column(Text(heading), overflow="fold", min_width=min(_WORDS_WIDTH, _longest(texts)))


def _add_numbers(grid: Grid, texts: Iterable[Text], heading: str = "") -> None:
    """Add a column as wide as its longest number; its heading may wrap, numbers never do."""
    words = (Text(word) for word in heading.split())
    grid.add_column(Text(heading), justify="right", width=max(_longest(texts), _longest(words)))


def _longest(texts: Iterable[Text]) -> int:
    return max((cell_len(line) for text in texts for line in text.plain.splitlines()), default=0)


def _as_printed(view: TableView) -> Grid:
    grid = _grid(_title(view))
    grid.add_column("")
    for column in view.columns:
        grid.add_column(Text(column.name), justify="right" if column.numeric else "left", no_wrap=True)
    for row in view.rows:
        grid.add_row(Text(row.label), *(_stacked(cell) for cell in row.cells))
    return grid


def _one_per_line(view: TableView) -> Grid:
    grid = _grid(_title(view))
    cells = [cell for row in view.rows for cell in row.cells]
    grid.add_column("", overflow="fold")
    _add_numbers(grid, map(_ours, cells), "ours")
    _add_numbers(grid, (Text(cell.paper) for cell in cells), "paper")
    _add_numbers(grid, (Text(cell.difference) for cell in cells), "difference")
    for row in view.rows:
        grid.add_row(Text(row.label, style="bold"))
        for column, cell in zip(view.columns, row.cells, strict=True):
            said = Text(f"  {column.name}").append(f"\n  {cell.note}" if cell.note else "", style=_QUIET)
            grid.add_row(said, _ours(cell), Text(cell.paper, style=_QUIET), _difference(cell))
        grid.add_section()
    return grid


def _one_per_block(view: TableView) -> Text:
    """Print every number below its name, for terminals with no room for columns."""
    text = Text().append(f"{_title(view)}\n", "bold")
    for row in view.rows:
        text.append(f"\n{row.label}\n", "bold")
        for column, cell in zip(view.columns, row.cells, strict=True):
            text.append(f"  {column.name}\n")
            for line in _stacked(cell).split():
                text.append("    ").append_text(line).append("\n")
    return text


def _title(view: TableView) -> str:
    return f"{view.table.title} ({view.table.better} is better)" if view.table.better else view.table.title


def _stacked(cell: CellView) -> Text:
    text = _ours(cell)
    for line in (cell.note, f"paper {cell.paper}" if cell.paper else ""):
        if line:
            text.append(f"\n{line}", style=_QUIET)
    if cell.difference:
        text.append("\n").append_text(_difference(cell))
    return text


def _difference(cell: CellView) -> Text:
    return Text(cell.difference, style=_VERDICTS.get(cell.verdict, _QUIET))


def _ours(cell: CellView) -> Text:
    marks = ["bold"] * cell.best + ["green"] * cell.best_forward
    style = " ".join(marks) or _STATES.get(cell.state, "")
    text = Text(cell.text, style=style)
    for variant in cell.variants:
        text.append(f"\n{variant.text} {variant.mark}", style=_QUIET)
    return text


def _costs(table: CostTable) -> Grid:
    grid = _grid(f"Cost. {table.note}")
    _add_words(grid, map(_cost_label, table.rows))
    for j, column in enumerate(table.columns):
        cells = [row.cells[j] for row in table.rows]
        add = _add_words if any(cell.is_words for cell in cells) else _add_numbers
        add(grid, (Text(cell.text) for cell in cells), column)
    for row in table.rows:
        grid.add_row(_cost_label(row), *(Text(cell.text) for cell in row.cells))
    return grid


def _one_cost_per_line(table: CostTable) -> Grid:
    grid = _grid(f"Cost. {table.note}")
    grid.show_header = False
    grid.add_column("", overflow="fold")
    _add_numbers(grid, (Text(cell.text) for row in table.rows for cell in row.cells if not cell.is_words))
    for row in table.rows:
        words = "".join(f"\n{cell.text}" for cell in row.cells if cell.is_words)
        grid.add_row(_cost_label(row, "bold").append(words, _QUIET))
        for column, cell in zip(table.columns, row.cells, strict=True):
            if not cell.is_words:
                grid.add_row(Text(f"  {column}"), Text(cell.text))
        grid.add_section()
    return grid


def _cost_label(row: CostRow, style: str = "") -> Text:
    return Text().append(row.label, style).append("".join(f"\n† {change}" for change in row.changes), _QUIET)
