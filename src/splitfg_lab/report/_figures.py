"""Figures as SVG that follows the page's colours; the same numbers always give the same bytes."""

from __future__ import annotations

import html
import io
import math
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from splitfg_lab.experiments.spec import Curves, Experiment, Figure
from splitfg_lab.report._groups import PresetRuns
from splitfg_lab.report._series import Drawing, Series, curve_drawing, for_logarithms, sweep_drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import XAxis, YAxis
    from matplotlib.figure import Figure as Canvas
    from matplotlib.lines import Line2D

INK, QUIET, GRID = "#22272d", "#69727d", "#dde1e6"
SERIES = ("#1b62a5", "#c2491d", "#12795a", "#8b4aa8", "#9a6b00", "#0d8496", "#b53a6b", "#5c6570")
DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)))
MARKERS = "osD^vP*X"

# What matplotlib draws in the light colours above, the page may recolour through these custom properties.
_THEME = {INK: "--fig-ink", QUIET: "--fig-quiet", GRID: "--fig-grid"} | {
    colour: f"--fig-series-{i}" for i, colour in enumerate(SERIES, start=1)
}
_WIDTH, _HEIGHT, _LEGEND_LINE = 5.2, 3.1, 0.17  # inches; narrow, so that text stays readable on a phone
_LABEL_WIDTH = 64
_MOST_TICKS = 8


@dataclass(frozen=True)
class FigureView:
    """A figure ready for the page: ``svg`` is ``None`` while there is nothing to draw."""

    figure: Figure
    svg: str | None
    notes: tuple[str, ...]


def view_figure(figure: Figure, experiment: Experiment, groups: Mapping[str, PresetRuns]) -> FigureView:
    """Draw a figure from the runs of its experiment."""
    drawing = _drawing(figure, experiment, groups)
    drawing = for_logarithms(drawing, x=figure.log_x and not drawing.categorical, y=figure.log_y)
    has_ours = any(series.style != "paper" for series in drawing.series)
    svg = _render(figure, drawing, salt=f"{experiment.name}-{figure.key}") if has_ours else None
    hidden = [label for label, value in _all_references(figure) if (label, value) not in _references(figure)]
    return FigureView(figure, svg, (*drawing.notes, *(f"{label}: not above zero, left out." for label in hidden)))


def _drawing(figure: Figure, experiment: Experiment, groups: Mapping[str, PresetRuns]) -> Drawing:
    if isinstance(figure, Curves):
        return curve_drawing(figure, groups)
    return sweep_drawing(figure, experiment, groups)


def _render(figure: Figure, drawing: Drawing, *, salt: str) -> str:
    # matplotlib takes a while to import and only the page needs it
    from matplotlib import style
    from matplotlib.figure import Figure as Canvas

    with style.context(_STYLE | {"svg.hashsalt": salt}, after_reset=True), _quiet_glyphs():
        canvas = Canvas(figsize=(_WIDTH, _HEIGHT), layout="constrained")
        axes = canvas.add_subplot()
        _scale(axes, figure, drawing)
        _legend(canvas, _draw(axes, figure, drawing))
        buffer = io.StringIO()
        canvas.savefig(buffer, format="svg", transparent=True, metadata=dict.fromkeys(_METADATA))
    return _themed(_bare(buffer.getvalue()), figure.title)


_METADATA = ("Date", "Creator", "Format", "Type")
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": QUIET,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.7,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "legend.handlelength": 2.4,
}


@contextmanager
def _quiet_glyphs() -> Iterator[None]:
    """Text stays text in the SVG, so a glyph that only the measuring font lacks is no loss."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def _scale(axes: Axes, figure: Figure, drawing: Drawing) -> None:
    ys = [y for series in drawing.series for y in series.y] + [y for _, y in _references(figure)]
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


def _tick_axis(axis: XAxis | YAxis, values: list[float]) -> None:
    """Labels as plain numbers; on a logarithmic axis several of them, however short the range."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    if axis.get_scale() == "log":
        axis.set_major_locator(LogLocator() if max(values) > 30 * min(values) else MaxNLocator(5))
    axis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))
    axis.set_minor_formatter(NullFormatter())


def _references(figure: Figure) -> tuple[tuple[str, float], ...]:
    """The horizontal lines that the figure's axis can show."""
    return tuple((label, value) for label, value in _all_references(figure) if value > 0 or not figure.log_y)


def _all_references(figure: Figure) -> tuple[tuple[str, float], ...]:
    return figure.references if isinstance(figure, Curves) else ()


def _tick(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) and abs(value) < 1e9 else f"{value:g}"


def _draw(axes: Axes, figure: Figure, drawing: Drawing) -> list[tuple[Line2D, str]]:
    """Draw every series and reference; returns the legend's entries."""
    entries = [(_DRAW[series.style](axes, series), series.label) for series in drawing.series]
    for index, (label, value) in enumerate(_references(figure)):
        line = axes.axhline(value, color=QUIET, linewidth=1, linestyle=DASHES[-1 - index % len(DASHES)])
        entries.append((line, f"{label}: {_tick(value)}"))
    x_label, y_label = _axis_labels(figure)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    return [(line, label) for line, label in entries if label]


def _axis_labels(figure: Figure) -> tuple[str, str]:
    if isinstance(figure, Curves):
        return {"step": "step", "wall_s": "wall time (s)"}[figure.x], figure.metric
    return figure.x_label or figure.field, figure.y_label or ", ".join(figure.labels or figure.metrics)


def _draw_curve(axes: Axes, series: Series) -> Line2D:
    look = _look(series, marked=len(series.x) < 2)
    if series.spread:
        low = [y - s for y, s in zip(series.y, series.spread, strict=True)]
        high = [y + s for y, s in zip(series.y, series.spread, strict=True)]
        axes.fill_between(series.x, low, high, color=look["color"], alpha=0.15, linewidth=0)
    return axes.plot(series.x, series.y, **look)[0]


def _draw_points(axes: Axes, series: Series) -> Line2D:
    look = _look(series, marked=True)
    if series.spread:
        axes.errorbar(series.x, series.y, yerr=series.spread, fmt="none", ecolor=look["color"], elinewidth=1, capsize=2)
    return axes.plot(series.x, series.y, **look)[0]


def _draw_diverged(axes: Axes, series: Series) -> Line2D:
    look = _look(series, marked=False) | {"linewidth": 0.9, "alpha": 0.8}
    axes.plot(series.x[-1:], series.y[-1:], color=look["color"], marker="x", linestyle="none", markersize=6)
    return axes.plot(series.x, series.y, **look)[0]


def _draw_paper(axes: Axes, series: Series) -> Line2D:
    look = _look(series, marked=True) | {"linestyle": (0, (1, 2)), "linewidth": 1, "markerfacecolor": "none"}
    return axes.plot(series.x, series.y, **look)[0]


_DRAW = {"curve": _draw_curve, "points": _draw_points, "diverged": _draw_diverged, "paper": _draw_paper}


def _look(series: Series, *, marked: bool) -> dict[str, Any]:
    """Colour, then dashes once colours run out; markers differ too, so that colour is never the only cue."""
    dash, colour = divmod(series.index, len(SERIES))
    marker = MARKERS[series.index % len(MARKERS)] if marked else ""
    return {"color": SERIES[colour], "linestyle": DASHES[dash % len(DASHES)], "marker": marker}


def _legend(canvas: Canvas, entries: list[tuple[Line2D, str]]) -> None:
    """Below the plot, two labels a line where they are short; the canvas grows to make room."""
    labels = [textwrap.fill(label, _LABEL_WIDTH) for _, label in entries]
    columns = 2 if len(labels) > 1 and max(map(len, labels)) <= _LABEL_WIDTH // 2 else 1
    lines = sum(label.count("\n") + 1 for label in labels)
    canvas.set_size_inches(_WIDTH, _HEIGHT + _LEGEND_LINE * math.ceil(lines / columns))
    canvas.legend([line for line, _ in entries], labels, loc="outside lower left", ncols=columns)


def _bare(svg: str) -> str:
    """The ``<svg>`` element alone, sized by its view box, with no name that another figure could have too."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r' (?:width|height)="[\d.]+pt"', "", svg, count=2)
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    referenced = set(re.findall(r"#([\w-]+)", svg))
    return _edit_tags(svg, r' id="([^"]+)"', lambda m: m.group(0) if m.group(1) in referenced else "")


def _themed(svg: str, label: str) -> str:
    """Colours by custom property with the light colour as fallback, and a name for screen readers."""
    svg = _edit_tags(svg, "|".join(_THEME), lambda m: f"var({_THEME[m.group(0)]}, {m.group(0)})")
    return svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(label)}"', 1)


def _edit_tags(svg: str, pattern: str, edit: Callable[[re.Match[str]], str]) -> str:
    """Replace a pattern inside tags only: what stands between them is somebody's text."""
    return re.sub(r"<[^<>]*>", lambda tag: re.sub(pattern, edit, tag.group(0)), svg)
