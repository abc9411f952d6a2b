"""One cell of a table: our mean and spread, the paper's value, and the difference between them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from splitfg_lab.experiments.spec import Cell, Paper, Table
from splitfg_lab.report._groups import PresetRuns, Variant, metric_summary
from splitfg_lab.report._numbers import Summary, difference, is_share, measured, number, quoted
from splitfg_lab.report._times import TIMES

State = Literal["measured", "diverged", "missing", "not run", "text"]
Verdict = Literal["better", "worse", "same", ""]


@dataclass(frozen=True)
class VariantCell:
    """The value of runs with overrides, and the mark of the footnote that lists these."""

    text: str
    mark: str


@dataclass(frozen=True)
class CellView:
    """One cell, ready to print.

    Attributes:
        text: ``61.9 ± 0.3 (5)``, ``+9.4, p = 0.012``, ``not run``, ``diverged``, or the table's own words.
        state: The kind of cell.
        note: Caveats of the mean (``3 of 5 seeds``, ``1 diverged``).
        paper: The paper's value; empty where it prints none.
        difference: Ours minus the paper's; empty where either is missing.
        verdict: Whether ours is better than the paper's, if the table has a direction.
        variants: Values from runs with overrides.
        value: Our mean, to sort and to compare by.
        runs: The number of runs behind the mean.
        error: The standard error of the mean; 0 with one run.
        forward_only: Whether the method has a trunk and no run took a reverse-mode pass through it.
        best: Best of all cells it is compared with.
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
    runs: int = 0
    error: float = 0.0
    forward_only: bool = False
    best: bool = False
    best_forward: bool = False


_NO_VALUE = CellView("no value", "missing", "the runs did not report this metric")
_NOT_ALONE = CellView("not timed", "missing", "the runs did not have their machine alone")


def view_cell(
    cell: Cell, table: Table, groups: Mapping[str, PresetRuns], marks: Mapping[tuple[str, ...], str]
) -> CellView:
    """Fill one cell; ``marks`` are the footnotes of overrides."""
    group = groups[cell.preset]
    digits = table.decimals if cell.decimals is None else cell.decimals
    view = _view_value(cell.metric, group, digits)
    if cell.over is not None:
        view = _view_ratio(view, cell.metric, groups[cell.over], digits)
    else:
        variants = (_view_variant(v, cell.metric, digits, marks) for v in group.variants)
        view = replace(view, variants=tuple(variant for variant in variants if variant is not None))
    return view if cell.paper is None else _beside_paper(view, cell, cell.paper, table, digits)


def _view_value(metric: str, group: PresetRuns, decimals: int) -> CellView:
    summary = metric_summary(group.runs, metric)
    if not group.runs:
        return CellView("not run", "not run")
    if summary.mean is None and not summary.diverged:
        untimed = metric in TIMES and not all(run.report.timed_alone for run in group.runs)
        return _NOT_ALONE if untimed else _NO_VALUE
    if summary.mean is None:
        return CellView("diverged", "diverged", _note(summary, group))
    return CellView(
        measured(summary, decimals),
        "measured",
        _note(summary, group),
        value=summary.mean,
        runs=summary.n,
        error=(summary.std or 0.0) / math.sqrt(summary.n),
        forward_only=not group.preset.counts and all(run.report.forward_only for run in group.runs),
    )


def _view_ratio(view: CellView, metric: str, other: PresetRuns, decimals: int) -> CellView:
    """Divide by another preset's value; if either is missing, return the cell that tells why."""
    reference = _view_value(metric, other, decimals)
    if view.value is None or not reference.value:
        return view if view.value is None else reference
    ratio, runs = view.value / reference.value, min(view.runs, reference.runs)
    error = abs(ratio) * math.hypot(view.error / (view.value or 1.0), reference.error / reference.value)
    text = number(ratio, decimals)
    return CellView(text, "measured", view.note, value=ratio, runs=runs, error=error, forward_only=view.forward_only)


def _note(summary: Summary, group: PresetRuns) -> str:
    planned, made = len(group.preset.seeds), len(group.runs)
    missing = made - summary.n - summary.diverged
    parts = [
        f"{summary.diverged} of {made} diverged" if summary.diverged and made > 1 else "",
        f"{missing} without a value" if missing else "",
        f"{made} of {planned} seeds" if made < planned else "",
    ]
    return ", ".join(part for part in parts if part)


def _view_variant(
    variant: Variant, metric: str, decimals: int, marks: Mapping[tuple[str, ...], str]
) -> VariantCell | None:
    """Return the value of runs with overrides; ``None`` if they did not measure the metric."""
    summary = metric_summary(variant.runs, metric)
    if summary.mean is None:
        return VariantCell("diverged", marks[variant.changes]) if summary.diverged else None
    return VariantCell(measured(summary, decimals), marks[variant.changes])


def _beside_paper(view: CellView, cell: Cell, paper: Paper, table: Table, decimals: int) -> CellView:
    view = replace(view, paper=quoted(paper, decimals))
    if view.value is None:
        return view
    # the ratio of two percentages is not a percentage
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
