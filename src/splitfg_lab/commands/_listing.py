"""Lists in a terminal: names that can be copied, next to text that wraps between words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

_NO_LIMIT = 100_000
_GAP = 1


def listing_console(*, stderr: bool = False) -> Console:
    """Return a console that wraps at words in a terminal, and does not wrap in a file or a pipe."""
    console = Console(highlight=False, stderr=stderr)
    return console if console.is_terminal else Console(highlight=False, stderr=stderr, width=_NO_LIMIT)


def print_rows(console: Console, rows: Iterable[Sequence[str | Text]], headings: Sequence[str] = ()) -> None:
    """Print rows in columns, or below their names if the columns would break a word.

    The first cell of a row is a name that is never wrapped.
    """
    cells = [[cell if isinstance(cell, Text) else Text(cell) for cell in row] for row in rows]
    if not cells:
        return
    least = [max((_longest_word(row[i]) for row in cells), default=0) for i in range(1, len(cells[0]))]
    name = max(len(row[0]) for row in cells)
    least = [max(width, len(heading)) for width, heading in zip(least, headings[1:] or ("",) * len(least), strict=True)]
    if _GAP + name + sum(least) + 2 * _GAP * len(least) <= console.width:
        console.print(_grid(cells, headings, [name, *least]))
        return
    for row in cells:
        console.print(Padding(row[0], (0, 0, 0, _GAP), expand=False))
        console.print(Padding(Text("  ").join(part for part in row[1:] if part), (0, 0, 0, 4), expand=False))


def _longest_word(text: Text) -> int:
    return max(map(len, text.plain.split()), default=0)


def _grid(cells: Sequence[Sequence[Text]], headings: Sequence[str], widths: Sequence[int]) -> Grid:
    grid = Grid(box=None, show_header=bool(headings), header_style="dim", padding=(0, _GAP))
    for i, width in enumerate(widths):
        grid.add_column(headings[i] if headings else "", no_wrap=i == 0, min_width=width, overflow="fold")
    for row in cells:
        grid.add_row(*row)
    return grid
