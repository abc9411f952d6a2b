"""Draw curves and sweeps: axes, lines, error bars, legend."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from splitfg_lab.experiments.spec import Curves, Sweep
from splitfg_lab.report._methods import COLOURS, colour_of
from splitfg_lab.report._series import Drawing, Series
from splitfg_lab.report._svg import HEIGHT, INK, QUIET, WIDTH
from splitfg_lab.report._words import axis_labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import XAxis, YAxis
    from matplotlib.figure import Figure as Canvas
    from matplotlib.lines import Line2D

DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)))
MARKERS = "osD^vP*X"
_LEGEND_LINE = 0.17  # inches
_LABEL_WIDTH = 64
_MOST_TICKS = 8
_MARKS_ON_A_CURVE = 8


def plot(canvas: Canvas, figure: Curves | Sweep, drawing: Drawing) -> None:
    """Draw the lines of a figure on a canvas, with a legend below."""
    axes = canvas.add_subplot()
    _scale(axes, figure, drawing)
    _legend(canvas, _draw(axes, figure, drawing))
    if isinstance(figure, Sweep) and figure.most is not None:
        _end_at(axes, figure.most, drawing)


def visible_references(figure: Curves | Sweep) -> tuple[tuple[str, float], ...]:
    """Return the horizontal lines that the figure's axis can show."""
    return tuple((label, value) for label, value in all_references(figure) if value > 0 or not figure.log_y)


def all_references(figure: Curves | Sweep) -> tuple[tuple[str, float], ...]:
    """Return the horizontal lines of a figure."""
    return figure.references if isinstance(figure, Curves) else ()


def _scale(axes: Axes, figure: Curves | Sweep, drawing: Drawing) -> None:
    ys = [y for series in drawing.series for y in series.y] + [y for _, y in visible_references(figure)]
    if figure.log_y:
        axes.set_yscale("log")
    _tick_axis(axes.yaxis, ys)
    if not drawing.categorical:
        xs = [x for series in drawing.series for x in series.x]
        if figure.log_x:
            axes.set_xscale("log")
        _tick_axis(axes.xaxis, xs)
        if axes.get_xscale() == "log" and len(set(xs)) <= _MOST_TICKS:
            axes.set_xticks(sorted(set(xs)))


def _end_at(axes: Axes, most: float, drawing: Drawing) -> None:
    """End the y axis at a value, and print larger ones above it."""
    beyond: dict[float, list[float]] = {}
    for series in drawing.series:
        for x, y in zip(series.x, series.y, strict=True):
            if y > most:
                beyond.setdefault(x, []).append(y)
    if beyond:
        axes.set_ylim(top=most)
    for x, values in beyond.items():
        text = f"↑ {', '.join(f'{value:.3g}' for value in sorted(values))}"
        axes.annotate(text, (x, most), xytext=(0, 2), textcoords="offset points", ha="center", va="bottom", color=QUIET)


def _tick_axis(axis: XAxis | YAxis, values: list[float]) -> None:
    """Label ticks with plain numbers; on a logarithmic axis several of them, however short the range."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    if axis.get_scale() == "log":
        axis.set_major_locator(LogLocator() if max(values) > 30 * min(values) else MaxNLocator(5))
    axis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))
    axis.set_minor_formatter(NullFormatter())


def _tick(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) and abs(value) < 1e9 else f"{value:g}"


def _draw(axes: Axes, figure: Curves | Sweep, drawing: Drawing) -> list[tuple[Line2D, str]]:
    """Draw every series and reference; return the legend's entries, without words that all labels share."""
    looks, labels = _looks(drawing), [series.label for series in drawing.series if series.label]
    start, end = _shared_start(labels), _shared_end(labels, figure.title)
    entries = [
        (_DRAW[series.style](axes, series, dict(looks[series.index])), series.label[len(start) :].removesuffix(end))
        for series in drawing.series
    ]
    for index, (label, value) in enumerate(visible_references(figure)):
        line = axes.axhline(value, color=QUIET, linewidth=1, linestyle=DASHES[2 - index % 3])
        entries.append((line, f"{label}: {_tick(value)}"))
    x_label, y_label = axis_labels(figure)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    return [(line, label) for line, label in entries if label]


def _shared_start(labels: Sequence[str]) -> str:
    """Return the words up to ``: `` that several labels have in common (``CIFAR-10: ``); empty if none."""
    starts = {label[: label.rfind(": ") + 2] if ": " in label else "" for label in labels}
    return starts.pop() if len(labels) > 1 and len(starts) == 1 else ""


def _shared_end(labels: Sequence[str], title: str) -> str:
    """Return the last words that several labels and the title have in common (``, 10% budget``); empty if none."""
    parts = [label.split(", ") for label in labels]
    end = ""
    while len(parts) > 1 and min(map(len, parts)) > 1 and len({last[-1] for last in parts}) == 1:
        word = parts[0][-1]
        if word not in title:
            break
        end = f", {word}{end}"
        parts = [part[:-1] for part in parts]
    return end


def _looks(drawing: Drawing) -> dict[int, dict[str, Any]]:
    """Return colour, dashes, marker and opacity by index.

    The method gives the colour. Lines of one method differ by dashes, marker and opacity; markers differ within a
    figure, so that colour is never the only cue.
    """
    seen: dict[str, int] = {}
    looks: dict[int, dict[str, Any]] = {}
    for index, method in {s.index: s.method for s in drawing.series}.items():
        place = seen.setdefault(method, 0)
        seen[method] += 1
        looks[index] = {
            "color": colour_of(method) or _other_colour(place),
            "linestyle": DASHES[place % len(DASHES)] if colour_of(method) else "-",
            "marker": MARKERS[len(looks) % len(MARKERS)],
            "alpha": max(0.45, 1 - 0.12 * place) if colour_of(method) else 1.0,
        }
    return looks


def _other_colour(place: int) -> str:
    """Return a colour for lines that belong to no method: ink and grey first."""
    return (INK, QUIET, *COLOURS[::-1])[place % (2 + len(COLOURS))]


def _draw_curve(axes: Axes, series: Series, look: dict[str, Any]) -> Line2D:
    if series.spread:
        low = [y - s for y, s in zip(series.y, series.spread, strict=True)]
        high = [y + s for y, s in zip(series.y, series.spread, strict=True)]
        axes.fill_between(series.x, low, high, color=look["color"], alpha=0.15, linewidth=0)
    every = max(1, len(series.x) // _MARKS_ON_A_CURVE)
    first = series.index * every // 4 % every  # staggered, so that markers of close lines do not cover each other
    return axes.plot(series.x, series.y, markevery=(first, every), **look)[0]


def _draw_points(axes: Axes, series: Series, look: dict[str, Any]) -> Line2D:
    if series.spread:
        axes.errorbar(series.x, series.y, yerr=series.spread, fmt="none", ecolor=look["color"], elinewidth=1, capsize=2)
    return axes.plot(series.x, series.y, **look)[0]


def _draw_diverged(axes: Axes, series: Series, look: dict[str, Any]) -> Line2D:
    look |= {"linewidth": 0.9, "alpha": 0.8, "marker": ""}
    axes.plot(series.x[-1:], series.y[-1:], color=look["color"], marker="x", linestyle="none", markersize=6)
    return axes.plot(series.x, series.y, **look)[0]


def _draw_paper(axes: Axes, series: Series, look: dict[str, Any]) -> Line2D:
    look |= {"linestyle": (0, (1, 2)), "linewidth": 1, "markerfacecolor": "none"}
    return axes.plot(series.x, series.y, **look)[0]


_DRAW = {"curve": _draw_curve, "points": _draw_points, "diverged": _draw_diverged, "paper": _draw_paper}


def _legend(canvas: Canvas, entries: list[tuple[Line2D, str]]) -> None:
    """Put the legend below the plot, two labels a line where they are short; the canvas grows to make room."""
    labels = [textwrap.fill(label, _LABEL_WIDTH) for _, label in entries]
    columns = 2 if len(labels) > 1 and max(map(len, labels)) <= _LABEL_WIDTH // 2 else 1
    lines = sum(label.count("\n") + 1 for label in labels)
    canvas.set_size_inches(WIDTH, HEIGHT + _LEGEND_LINE * math.ceil(lines / columns))
    canvas.legend([line for line, _ in entries], labels, loc="outside lower left", ncols=columns)
