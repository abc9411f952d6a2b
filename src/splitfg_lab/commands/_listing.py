"""Lists in a terminal: a name that can be typed back, never cut, and words about it, which may wrap."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

_NO_LIMIT = 100_000


def listing_console() -> Console:
    """A console as wide as its terminal; without a limit where the output goes to a file or a pipe."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_NO_LIMIT)


def name_grid(rows: Iterable[Sequence[str | Text]], headings: Sequence[str] = ()) -> Grid:
    """Rows whose first column is as wide as its longest name; the others are folded where there is no room."""
    rows = list(rows)
    longest = max((len(row[0]) for row in rows), default=0)
    grid = Grid(box=None, show_header=bool(headings), header_style="dim", padding=(0, 2))
    columns = headings or ("",) * max((len(row) for row in rows), default=1)
    grid.add_column(columns[0], no_wrap=True, min_width=longest)
    for heading in columns[1:]:
        grid.add_column(heading, overflow="fold")
    for row in rows:
        # a string would be read as markup
        grid.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))
    return grid
