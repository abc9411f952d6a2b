"""Tables of an experiment as data: rows of cells, with the paper's numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal


@dataclass(frozen=True)
class Paper:
    """A number of the paper, with its standard deviation if the paper gives one."""

    mean: float
    std: float | None = None


@dataclass(frozen=True)
class Cell:
    """One measured number of a table: a preset, a metric of its report, and the paper's value.

    ``preset`` is one of the table's own experiment, or another experiment's as ``EXPERIMENT/PRESET``. ``decimals``
    overrides the table's digits after the point. With ``over``, the number is the ratio of the means of this preset and
    that one. A cell that is not ``ranked`` takes no part in marking the best number.
    """

    preset: str
    metric: str
    paper: Paper | None = None
    decimals: int | None = None
    over: str | None = None
    ranked: bool = True


@dataclass(frozen=True)
class Paired:
    """A paired t-test of a table: the lead of one preset over another, on the seeds of both.

    The p-values of a table are corrected for the number of its tests.

    Attributes:
        preset: The preset that leads.
        against: The preset it is compared with.
        metric: The metric to compare.
        better: The direction that is better.
        decimals: Digits of the lead after the point; ``None`` for the table's.
    """

    preset: str
    against: str
    metric: str
    better: Literal["lower", "higher"]
    decimals: int | None = None


@dataclass(frozen=True)
class Row:
    """A labelled row. A string cell is printed unchanged; ``None`` means that the method does not apply."""

    label: str
    cells: tuple[Cell | Paired | str | None, ...]


@dataclass(frozen=True)
class Table:
    """A table of the paper: ``columns`` name the cells of every row.

    Attributes:
        better: The direction that is better, for highlighting; ``None`` to highlight nothing.
        best_in: Where the best cell is marked: in each row (methods side by side), in each column, or in the whole
            table (a grid of settings).
        decimals: Digits after the point.
        collapse: Leave out rows and columns of which nothing was run, and list them below.
        fewest: With ``collapse``, leave out rows with fewer numbers than this too.
    """

    key: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    better: Literal["lower", "higher"] | None = None
    best_in: Literal["row", "column", "table"] = "column"
    decimals: int = 1
    note: str = ""
    collapse: bool = False
    fewest: int = 1


SUMMARY_COLUMNS: Final = ("Backprop", "Frozen trunk", "Pure FG", "Split-FG", "Beyond the paper")
"""The columns of a report's summary."""


@dataclass(frozen=True)
class Headline:
    """A row of the report's summary: one task under several methods.

    Attributes:
        label: The task and the metric with its unit.
        cells: Cells by column, of :data:`SUMMARY_COLUMNS`.
        better: Which way is better.
        beyond: Which method is in the column ``Beyond the paper``.
        decimals: Digits after the point.
    """

    label: str
    cells: Mapping[str, Cell]
    better: Literal["lower", "higher"]
    beyond: str = ""
    decimals: int = 1

    def __post_init__(self) -> None:
        unknown = [name for name in self.cells if name not in SUMMARY_COLUMNS]
        if unknown:
            raise ValueError(f"no column {', '.join(unknown)} in the summary; columns: {', '.join(SUMMARY_COLUMNS)}")
