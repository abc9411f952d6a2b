"""Draw matrices that runs record: confusion matrices, and the filters of a trunk's first convolution."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from splitfg_lab.experiments.spec import Confusion, Filters
from splitfg_lab.report._groups import PresetRuns
from splitfg_lab.report._methods import COLOURS
from splitfg_lab.report._svg import WIDTH
from splitfg_lab.runs.record import Matrix

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

BEFORE = "Before training"
_CONFUSION, _FILTERS_BEFORE, _FILTERS_AFTER = "confusion", "filters_before", "filters_after"
_COLUMNS = 2
_CHANNELS = 3
_TITLE_WIDTH = 34


def confusions(figure: Confusion, groups: Mapping[str, PresetRuns]) -> dict[str, Matrix]:
    """Return the confusion matrices by title, summed over the runs of a preset that recorded one."""
    found: dict[str, Matrix] = {}
    for name in figure.presets:
        matrices = [m for m in _recorded(groups[name], _CONFUSION) if all(len(row) == len(m) for row in m)]
        same = [m for m in matrices if len(m) == len(matrices[0])]
        if same:
            rows = zip(*same, strict=True)
            found[groups[name].preset.title] = tuple(tuple(map(sum, zip(*row, strict=True))) for row in rows)
    return found


def draw_confusions(canvas: Canvas, matrices: Mapping[str, Matrix], classes: Sequence[str]) -> None:
    """Draw matrices in rows of two: the share of each true class (row) that is assigned to each class (column)."""
    rows = math.ceil(len(matrices) / _COLUMNS)
    columns = min(_COLUMNS, len(matrices))
    canvas.set_size_inches(WIDTH, (WIDTH / columns + 0.5) * rows)
    grid = canvas.subplots(rows, columns, squeeze=False)
    for axes, (title, matrix) in zip(grid.flat, matrices.items(), strict=False):
        shares = [[count / (sum(row) or 1) for count in row] for row in matrix]
        names = classes if len(classes) == len(matrix) else [str(i) for i in range(len(matrix))]
        axes.pcolormesh(shares, cmap=_colours(), vmin=0, vmax=1, edgecolors="none")
        axes.set_aspect("equal")
        axes.invert_yaxis()
        axes.grid(visible=False)
        axes.set_title(textwrap.fill(title, _TITLE_WIDTH))
        axes.set_xlabel("assigned class")
        axes.set_ylabel("true class")
        ticks = [i + 0.5 for i in range(len(matrix))]
        axes.set_xticks(ticks, names, rotation=90, fontsize=6)
        axes.set_yticks(ticks, names, fontsize=6)
    for axes in list(grid.flat)[len(matrices) :]:
        axes.set_axis_off()


def filter_rows(figure: Filters, groups: Mapping[str, PresetRuns]) -> dict[str, Matrix]:
    """Return the filters before training and, by preset title, after it; empty if no run recorded any."""
    after = {groups[name].preset.title: _recorded_filters(groups[name], _FILTERS_AFTER) for name in figure.presets}
    before = [m for name in figure.presets for m in _recorded_filters(groups[name], _FILTERS_BEFORE)]
    drawn = {title: matrices[0] for title, matrices in after.items() if matrices}
    return {BEFORE: before[0], **drawn} if before and drawn else {}


def draw_filters(canvas: Canvas, rows: Mapping[str, Matrix]) -> None:
    """Draw one line of filters per entry; each filter is scaled by its own largest weight, grey is zero."""
    count = max(len(filters) for filters in rows.values())
    canvas.set_size_inches(WIDTH, (WIDTH / count + 0.34) * len(rows))
    parts = canvas.subfigures(len(rows), 1, squeeze=False)
    for part, (title, filters) in zip(parts.flat, rows.items(), strict=True):
        part.suptitle(title, fontsize=8.5, x=0.01, ha="left")
        for axes, weights in zip(part.subplots(1, count, squeeze=False).flat, filters, strict=False):
            axes.pcolormesh(_pixels(weights))
            axes.set_aspect("equal")
            axes.invert_yaxis()
            axes.set_axis_off()


def _pixels(weights: Sequence[float]) -> list[list[tuple[float, ...]]]:
    """Return a filter as rows of red, green and blue between 0 and 1."""
    side = math.isqrt(len(weights) // _CHANNELS)
    largest = max(map(abs, weights)) or 1.0
    at = [0.5 + w / largest / 2 for w in weights]
    return [
        [tuple(at[c * side * side + i * side + j] for c in range(_CHANNELS)) for j in range(side)] for i in range(side)
    ]


def _recorded(group: PresetRuns, name: str) -> list[Matrix]:
    """Return the matrices of that name that are not empty."""
    return [run.report.matrices[name] for run in group.runs if run.report.matrices.get(name)]


def _recorded_filters(group: PresetRuns, name: str) -> list[Matrix]:
    """Return the matrices whose rows are square filters with three channels."""
    return [m for m in _recorded(group, name) if all(_is_filter(row) for row in m)]


def _is_filter(weights: Sequence[float]) -> bool:
    pixels, rest = divmod(len(weights), _CHANNELS)
    return pixels > 0 and rest == 0 and math.isqrt(pixels) ** 2 == pixels


def _colours() -> object:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("shares", ["#eef2f6", COLOURS[0]])
