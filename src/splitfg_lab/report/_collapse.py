"""Tables without the rows and columns that have nothing to show, and lists of those."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from splitfg_lab.report._cell_view import CellView

FEW = 3
"""Names up to this number are printed in one line; more are folded where a page can fold."""

DASH = "–"
"""The text of a cell to which the row's method does not apply."""


@dataclass(frozen=True)
class RowView:
    """A labelled row of cells."""

    label: str
    cells: tuple[CellView, ...]


@dataclass(frozen=True)
class ColumnView:
    """A column.

    Attributes:
        name: Its heading.
        numeric: Whether it holds measured numbers.
        pinned: Whether the page keeps it in view while others scroll: the only column of Split-FG.
    """

    name: str
    numeric: bool
    pinned: bool = False


@dataclass(frozen=True)
class LeftOut:
    """The rows and columns that a table leaves out for one reason."""

    reason: str
    names: tuple[str, ...]

    @property
    def line(self) -> str:
        """The reason and all names."""
        return f"{self.reason}: {'; '.join(self.names)}."

    @property
    def summary(self) -> str:
        """The reason and the number of names, or an empty text if there are few enough for a line."""
        return f"{self.reason}: {len(self.names)} rows or columns" if len(self.names) > FEW else ""


def collapse(
    columns: Sequence[ColumnView], rows: Sequence[RowView], fewest: int = 1
) -> tuple[tuple[ColumnView, ...], tuple[RowView, ...], tuple[LeftOut, ...]]:
    """Leave out rows and columns of which nothing was run, and rows with fewer numbers than ``fewest``.

    A table of which nothing remains keeps all.
    """
    run = [row for row in rows if not _is_unrun(row.cells)]
    kept = [row for row in run if not _is_sparse(row.cells, fewest)]
    if not kept:
        return tuple(columns), tuple(rows), ()
    unrun = [_row_name(row, rows) for row in rows if _is_unrun(row.cells)]
    unrun += [f"the column {c.name}" for j, c in enumerate(columns) if _is_unrun([row.cells[j] for row in run])]
    sparse = [_row_name(row, rows) for row in run if _is_sparse(row.cells, fewest)]
    filled = [j for j in range(len(columns)) if _has_content([row.cells[j] for row in kept])]
    shown = tuple(RowView(row.label, tuple(row.cells[j] for j in filled)) for row in kept)
    reasons = {"Not run": unrun, f"Fewer than {fewest} numbers": sparse}
    left_out = tuple(LeftOut(reason, tuple(names)) for reason, names in reasons.items() if names)
    return tuple(columns[j] for j in filled), shown, left_out


def _row_name(row: RowView, rows: Sequence[RowView]) -> str:
    """Return a row's label, with its first words where other rows have the same label."""
    words = [cell.text for cell in row.cells if cell.state == "text"]
    shared = sum(other.label == row.label for other in rows) > 1
    return f"{row.label}, {words[0]}" if shared and words else row.label


def _is_unrun(cells: Sequence[CellView]) -> bool:
    """Return whether there are cells for runs, none of these was run, and the paper has none either."""
    states = {cell.state for cell in cells} - {"text"}
    return states == {"not run"} and not any(_is_number(cell) for cell in cells)


def _is_sparse(cells: Sequence[CellView], fewest: int) -> bool:
    return sum(map(_is_number, cells)) < fewest and any(cell.state != "text" for cell in cells)


def _has_content(cells: Sequence[CellView]) -> bool:
    """Return whether a column has numbers or words; a dash is neither."""
    return any(_is_number(cell) or (cell.state == "text" and cell.text != DASH) for cell in cells)


def _is_number(cell: CellView) -> bool:
    """Return whether there is a number of ours or of the paper, or a run that has none."""
    return bool(cell.state not in ("text", "not run") or cell.variants or cell.paper)
