"""Mark the best cells of a table, where the runs behind them support a ranking."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from splitfg_lab.experiments.spec import Cell, Table
from splitfg_lab.report._cell_view import CellView

ENOUGH_RUNS = 3
"""Runs that a value needs to win by a small gap."""

SMALL_GAP = 0.05
"""A gap below this share of the best value is small."""

ERRORS = 2.0
"""Values that differ by fewer standard errors than this are not told apart."""

Place = tuple[int, int]


def mark_best(rows: list[list[CellView]], table: Table) -> None:
    """Mark, in place, the best cell of every line of cells that compete, and the best without a backward pass.

    A cell wins by a small gap only if it and every cell within that gap rest on at least three runs: one seed does not
    rank two methods that are close. Cells within two standard errors of the best are marked with it.
    """
    for line in _compared_lines(table):
        _mark_line(rows, line, table)


def _compared_lines(table: Table) -> list[list[Place]]:
    """Group the cells that compete: those of one row or column, or all, and among them only the same metric."""
    lines: dict[tuple[int, str, str | None], list[Place]] = {}
    for i, row in enumerate(table.rows):
        for j, cell in enumerate(row.cells):
            if isinstance(cell, Cell) and cell.ranked:
                line = {"row": i, "column": j, "table": 0}[table.best_in]
                lines.setdefault((line, cell.metric, cell.over), []).append((i, j))
    return list(lines.values())


def _mark_line(rows: list[list[CellView]], line: Sequence[Place], table: Table) -> None:
    cells = {(i, j): rows[i][j] for i, j in line if rows[i][j].value is not None}
    forward = {place: cell for place, cell in cells.items() if cell.forward_only}
    for i, j in _winners(cells, table):
        rows[i][j] = replace(rows[i][j], best=True)
    for i, j in _winners(forward, table):
        rows[i][j] = replace(rows[i][j], best_forward=True)


def _winners(cells: Mapping[Place, CellView], table: Table) -> list[Place]:
    """Return the places of the best value and of those not told apart from it; a single cell does not win."""
    if table.better is None or len(cells) < 2:
        return []
    # compared at the printed precision: equal digits are a tie
    values = {place: round(cell.value or 0.0, _digits(table, *place)) for place, cell in cells.items()}
    first = (max if table.better == "higher" else min)(values, key=lambda place: values[place])
    best, error = values[first], cells[first].error
    close = [place for place, value in values.items() if abs(value - best) <= SMALL_GAP * abs(best)]
    if len(close) > 1 and any(cells[place].runs < ENOUGH_RUNS for place in close):
        return []
    return [place for place in close if abs(values[place] - best) <= ERRORS * math.hypot(error, cells[place].error)]


def _digits(table: Table, i: int, j: int) -> int:
    cell = table.rows[i].cells[j]
    own = cell.decimals if isinstance(cell, Cell) else None
    return table.decimals if own is None else own
