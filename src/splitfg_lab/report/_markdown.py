"""The report as Markdown, for a repository's pages; only the HTML page has figures."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from splitfg_lab.experiments.spec import SUMMARY_COLUMNS
from splitfg_lab.report._cell_view import CellView
from splitfg_lab.report._costs import CostTable
from splitfg_lab.report._summary import SummaryRow
from splitfg_lab.report._table_view import TableView
from splitfg_lab.report._views import ExperimentView, ReportView
from splitfg_lab.report._words import AUTHORS, PAPER

_INTRODUCTION = f"""\
# {PAPER}: the paper and our runs

The paper is by {AUTHORS}. Each of our numbers is the mean ± sample standard deviation over the runs in brackets, with
the paper's value and the difference (ours minus the paper's) below it. **Bold** marks the best number of those it is
compared with, ★ the best with no backward pass through the trunk; with a lead below 5% only if three runs or more are
behind each number, and then together with all numbers within two standard errors. † marks runs with a changed config,
which are never part of a mean."""


def render_markdown(report: ReportView) -> str:
    """Return the report as one Markdown document; all text in it is escaped."""
    blocks = [_INTRODUCTION, *_summary(report.summary), "## Overview", _overview(report.experiments)]
    for view in report.experiments:
        blocks += _experiment(view)
    blocks += _left_out(report)
    return "\n\n".join(block for block in blocks if block) + "\n"


def _summary(rows: Sequence[SummaryRow]) -> Iterator[str]:
    if not rows:
        return
    yield "## Summary"
    yield _grid(("", *SUMMARY_COLUMNS), [(_summary_label(row), *map(_cell, row.cells)) for row in rows])


def _summary_label(row: SummaryRow) -> str:
    beyond = f"<br>Beyond the paper: {_escape(row.beyond)}." if row.beyond else ""
    return f"{_escape(row.label)}, {row.better} is better{beyond}"


def _overview(experiments: Sequence[ExperimentView]) -> str:
    rows = [
        (
            _escape(view.experiment.title),
            _escape(view.experiment.source),
            f"{view.done} of {view.planned}",
            str(len(view.diverged)),
        )
        for view in experiments
    ]
    return _grid(("Experiment", "In the paper", "Runs done", "Diverged"), rows)


def _experiment(view: ExperimentView) -> Iterator[str]:
    yield f"## {_escape(view.experiment.title)}"
    yield _escape(view.experiment.source)
    yield _escape(view.experiment.note)
    for table in view.tables:
        yield from _results(table)
    if view.costs:
        yield from _costs(view.costs)
    for name, reason in view.diverged:
        yield f"Diverged: {_escape(name)}. {_escape(reason)}"
    if view.unfinished:
        yield f"Started and not finished: {', '.join(map(_escape, view.unfinished))}."
    if view.not_run:
        yield from _folded(f"{len(view.not_run)} of {len(view.experiment.presets)} presets not run yet", view.not_run)


def _folded(summary: str, names: Iterable[str]) -> Iterator[str]:
    """Yield a list that is closed at first."""
    yield f"<details><summary>{_escape(summary)}</summary>"
    yield "\n".join(f"- {_escape(name)}" for name in names)
    yield "</details>"


def _costs(table: CostTable) -> Iterator[str]:
    rows = []
    for row in table.rows:
        label = "<br>".join([_escape(row.label), *(f"† {_escape(change)}" for change in row.changes)])
        rows.append((label, *(_escape(cell.text) for cell in row.cells)))
    yield "### Cost"
    if table.is_long:
        yield f"<details><summary>{_escape(table.summary)}</summary>"
    yield _grid(("Preset", *table.columns), rows)
    yield _escape(table.note)
    yield "</details>" if table.is_long else ""


def _results(view: TableView) -> Iterator[str]:
    table = view.table
    yield f"### {_escape(table.title)}"
    if view.provenance is None:
        yield "<details><summary>Not run yet: the paper's numbers</summary>"
        yield from _filled(view)
        yield "</details>"
    else:
        yield from _filled(view)


def _filled(view: TableView) -> Iterator[str]:
    table = view.table
    yield f"{table.better.capitalize()} is better." if table.better else ""
    rows = [(_escape(row.label), *(_cell(cell) for cell in row.cells)) for row in view.rows]
    yield _grid(("", *(_escape(column.name) for column in view.columns)), rows)
    yield _escape(table.note)
    yield "\n".join(f"- {mark} {_escape(text)}" for mark, text in view.footnotes)
    for left_out in view.left_out:
        yield from _folded(left_out.summary, left_out.names) if left_out.summary else (_escape(left_out.line),)
    if view.provenance:
        yield f"Runs behind these numbers: {_escape(view.provenance.line)}."


def _cell(cell: CellView) -> str:
    ours = _escape(cell.text)
    ours = f"**{ours}**" if cell.best else f"*{ours}*" if cell.state not in ("measured", "text") else ours
    lines = [f"{ours} ★" if cell.best_forward else ours, _escape(cell.note)]
    lines += [f"{_escape(variant.text)} {variant.mark}" for variant in cell.variants]
    lines += [f"paper {_escape(cell.paper)}" if cell.paper else "", _escape(cell.difference)]
    return "<br>".join(line for line in lines if line)


def _left_out(report: ReportView) -> Iterator[str]:
    if report.problems:
        yield "## Could not be read"
        yield "\n".join(f"- {_escape(problem)}" for problem in report.problems)
    if report.strangers:
        yield "## Runs of no preset known here"
        yield "\n".join(f"- {_escape(run.name)} ({_escape(run.source)})" for run in report.strangers)


def _grid(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _escape(text: str) -> str:
    """Return text on one line, with everything escaped that Markdown or HTML would interpret."""
    text = " ".join(text.split())
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_{}\[\]|~#$])", r"\\\1", text)
