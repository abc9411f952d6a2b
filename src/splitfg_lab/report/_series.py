"""The lines of a figure as numbers, before drawing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from statistics import fmean, stdev
from typing import Any, Literal, TypeAlias

from splitfg_lab.experiments.spec import Cell, Curves, Experiment, Paper, Preset, Sweep
from splitfg_lab.report._groups import PresetRuns, metric_summary
from splitfg_lab.report._methods import method_in, method_of, method_titled
from splitfg_lab.report._numbers import Summary, is_usable
from splitfg_lab.report._step_times import step_times
from splitfg_lab.report._words import metric_words
from splitfg_lab.runs.results import RunRecord

MAX_POINTS = 400
"""More than a figure can show; longer curves are thinned to this many points."""


Style: TypeAlias = Literal["curve", "points", "diverged", "paper"]


@dataclass(frozen=True)
class Series:
    """One line.

    Attributes:
        index: Which of the figure's contenders it belongs to; lines of one index share their colour.
        label: For the legend; empty where another line of the same index is named there.
        x: Positions; numbers in ascending order, or names where the axis is categorical.
        y: Values, mean over seeds.
        spread: Standard deviations over seeds; empty where there is one seed.
        style: The mean as a ``curve`` or as ``points``, a run that ``diverged``, or the ``paper``'s values.
        method: The method it belongs to, which gives its colour; empty if none.
    """

    index: int
    label: str
    x: tuple[Any, ...]
    y: tuple[float, ...]
    spread: tuple[float, ...] = ()
    style: Style = "curve"
    method: str = ""


@dataclass(frozen=True)
class Drawing:
    """The lines of a figure, and notes on everything it leaves out."""

    series: tuple[Series, ...]
    notes: tuple[str, ...]
    categorical: bool = False


def curve_drawing(figure: Curves, groups: Mapping[str, PresetRuns]) -> Drawing:
    """Return learning curves: the mean over finished runs, and every run that diverged up to its last point."""
    series: list[Series] = []
    notes: list[str] = []
    times = step_times(figure, groups)
    divisor = _divisor(figure, groups)
    for index, name in enumerate(figure.presets):
        method = method_of(groups[name].preset.config)
        lines = [dataclasses.replace(line, method=method) for line in _preset_curves(index, figure, groups[name])]
        if figure.step_ms:
            lines = [_in_seconds(line, times[name]) for line in lines if name in times]
        if figure.over:
            lines = _over(lines, divisor)
        series += lines
        notes += _curve_notes(groups[name], drawn=bool(lines), timed=name in times or not figure.step_ms)
    return Drawing(tuple(series), tuple(notes))


def sweep_drawing(figure: Sweep, experiment: Experiment, groups: Mapping[str, PresetRuns]) -> Drawing:
    """Return final metrics against a config field, with the paper's values where a table has them."""
    if figure.lines:
        return _ratio_drawing(figure, groups)
    places, categorical = _places(figure, [groups[name].preset for name in figure.presets])
    printed = _paper_values(experiment)
    series: list[Series] = []
    labels = figure.labels or tuple(map(metric_words, figure.metrics))
    for index, (metric, label) in enumerate(zip(figure.metrics, labels, strict=True)):
        ours = [(x, metric_summary(groups[name].runs, metric)) for x, name in places]
        paper = [(x, printed[name, metric].mean) for x, name in places if (name, metric) in printed]
        lines = (_measured_line(index, label, ours), _paper_line(index, label, paper))
        method = (
            method_in(metric)
            or method_titled(label)
            or _shared_method([groups[name].preset for name in figure.presets])
        )
        series += [dataclasses.replace(line, method=method) for line in lines]
    notes = [note for name in figure.presets for note in _sweep_notes(groups[name])]
    return Drawing(tuple(line for line in series if line.x), tuple(notes), categorical)


def _ratio_drawing(figure: Sweep, groups: Mapping[str, PresetRuns]) -> Drawing:
    """Return one line for every group of presets, divided by the reference's values at the same place."""
    (metric,) = figure.metrics

    def means(names: Sequence[str]) -> dict[Any, float]:
        places, _ = _places(figure, [groups[name].preset for name in names])
        found = {x: metric_summary(groups[name].runs, metric).mean for x, name in places}
        return {x: mean for x, mean in found.items() if mean is not None}

    below, series = means(figure.over), []
    for index, (label, names) in enumerate(_named_lines(figure)):
        points = {x: mean / below[x] for x, mean in means(names).items() if x in below}
        method = _shared_method([groups[name].preset for name in names])
        line = Series(index, label, tuple(points), tuple(points.values()), style="points", method=method)
        series += [line] if points else []
    notes = _unrun_notes(figure, groups)
    notes += [note for name in figure.presets if groups[name].runs for note in _sweep_notes(groups[name])]
    return Drawing(tuple(series), tuple(notes))


def _unrun_notes(figure: Sweep, groups: Mapping[str, PresetRuns]) -> list[str]:
    """Return a note for every line of which something was not run."""
    counts = [(label, sum(bool(groups[n].runs) for n in names), len(names)) for label, names in _named_lines(figure)]
    return [f"{label}: {run or 'none'} of {planned} points run." for label, run, planned in counts if run < planned]


def _named_lines(figure: Sweep) -> list[tuple[str, tuple[str, ...]]]:
    return list(zip(figure.labels, figure.lines, strict=True))


def _shared_method(presets: Sequence[Preset]) -> str:
    """Return the method of these presets if they have one in common; empty otherwise."""
    methods = {method_of(preset.config) for preset in presets}
    return methods.pop() if len(methods) == 1 else ""


def for_logarithms(drawing: Drawing, *, x: bool, y: bool) -> Drawing:
    """Drop the points that logarithmic axes cannot show; the legend, or else the notes, count them."""
    names = {line.index: line.label for line in reversed(drawing.series) if line.label}
    series: list[Series] = []
    notes: list[str] = []
    for line in drawing.series:
        kept = _positive(line, x=x, y=y)
        lost = len(line.x) - len(kept.x)
        said = f"{lost} point{'s' if lost > 1 else ''} not above zero left out" if lost else ""
        if said and kept.x and line.label:
            kept = dataclasses.replace(kept, label=f"{line.label} ({said})")
        elif said:
            notes.append(f"{names.get(line.index, line.style)}: {said}.")
        series += [kept] if kept.x else []
    return Drawing(tuple(series), (*drawing.notes, *notes), drawing.categorical)


def _positive(line: Series, *, x: bool, y: bool) -> Series:
    keep = [(not x or a > 0) and (not y or b > 0) for a, b in zip(line.x, line.y, strict=True)]
    xs, ys, spread = (tuple(compress(column, keep)) for column in (line.x, line.y, line.spread))
    return dataclasses.replace(line, x=xs, y=ys, spread=spread)


def field_value(config: Any, path: str) -> Any:
    """Return the value at a dotted path of a config."""
    for name in path.split("."):
        config = config[name] if isinstance(config, Mapping) else getattr(config, name)
    return config


def _preset_curves(index: int, figure: Curves, group: PresetRuns) -> list[Series]:
    title = group.preset.title
    finished = [_points(run, figure) for run in group.runs if run.report.status == "done"]
    mean = _mean_curve(index, title, [points for points in finished if points])
    broken = [
        Series(index, "", *_columns(_points(run, figure)), style="diverged")
        for run in group.runs
        if run.report.status == "diverged"
    ]
    lines = [line for line in (mean, *broken) if line.x]
    if lines and lines[0].style == "diverged":
        lines[0] = dataclasses.replace(lines[0], label=f"{title} (diverged)")
    return lines


def _divisor(figure: Curves, groups: Mapping[str, PresetRuns]) -> dict[float, float]:
    """Return the mean curve that divides the others, by step; empty if there is none."""
    lines = _preset_curves(0, figure, groups[figure.over]) if figure.over else []
    return {x: y for line in lines if line.style == "curve" for x, y in zip(line.x, line.y, strict=True)}


def _over(lines: Sequence[Series], divisor: Mapping[float, float]) -> list[Series]:
    """Return lines divided by another at the steps that both have."""
    divided = []
    for line in lines:
        keep = [x in divisor for x in line.x]
        x, y, spread = (tuple(compress(column, keep)) for column in (line.x, line.y, line.spread))
        below = [divisor[step] for step in x]
        y, spread = (tuple(a / b for a, b in zip(column, below, strict=False)) for column in (y, spread))
        divided += [dataclasses.replace(line, x=x, y=y, spread=spread)] if x else []
    return divided


def _in_seconds(line: Series, ms: float) -> Series:
    """Return the line over time instead of steps, for steps of ``ms`` milliseconds."""
    return dataclasses.replace(line, x=tuple(step * ms / 1000 for step in line.x))


def _points(run: RunRecord, figure: Curves) -> dict[float, tuple[float, float]]:
    """Return the position on the x axis and the value, by step."""
    return {
        point["step"]: (point[figure.x], point[figure.metric])
        for point in run.curve
        if figure.x in point and is_usable(point.get(figure.metric, math.nan))
    }


def _mean_curve(index: int, label: str, runs: Sequence[Mapping[float, tuple[float, float]]]) -> Series:
    """Return the mean at the steps that all runs logged, so that a missing run causes no jump."""
    steps = sorted(set.intersection(*(set(run) for run in runs))) if runs else []
    columns = [[run[step] for run in runs] for step in _thin(steps)]
    x = tuple(fmean(place for place, _ in column) for column in columns)
    y = tuple(fmean(value for _, value in column) for column in columns)
    spread = tuple(stdev(value for _, value in column) for column in columns) if len(runs) > 1 else ()
    return Series(index, label, x, y, spread)


def _columns(points: Mapping[float, tuple[float, float]]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    kept = [points[step] for step in _thin(sorted(points))]
    return tuple(x for x, _ in kept), tuple(y for _, y in kept)


def _thin(steps: Sequence[float]) -> list[float]:
    if len(steps) <= MAX_POINTS:
        return list(steps)
    last = len(steps) - 1
    return [steps[round(i * last / (MAX_POINTS - 1))] for i in range(MAX_POINTS)]


def _places(figure: Sweep, presets: Sequence[Preset]) -> tuple[list[tuple[Any, str]], bool]:
    """Return position and preset name: ascending if all positions are numbers, else as text in the given order."""
    values = [(field_value(preset.config, figure.field), preset.name) for preset in presets]
    if all(isinstance(x, int | float) and not isinstance(x, bool) for x, _ in values):
        return sorted(values), False
    return [(_name(x), name) for x, name in values], True


def _name(value: Any) -> str:
    return type(value).__name__ if dataclasses.is_dataclass(value) else str(value)


def _measured_line(index: int, label: str, ours: Sequence[tuple[Any, Summary]]) -> Series:
    points = [(x, s.mean, s.std or 0.0) for x, s in ours if s.mean is not None]
    spread = tuple(std for _, _, std in points)
    x, y = tuple(x for x, _, _ in points), tuple(mean for _, mean, _ in points)
    return Series(index, label, x, y, spread if any(spread) else (), style="points")


def _paper_line(index: int, label: str, paper: Sequence[tuple[Any, float]]) -> Series:
    return Series(index, f"{label} (paper)", tuple(x for x, _ in paper), tuple(y for _, y in paper), style="paper")


def _paper_values(experiment: Experiment) -> dict[tuple[str, str], Paper]:
    return {
        (cell.preset, cell.metric): cell.paper
        for table in experiment.tables
        for row in table.rows
        for cell in row.cells
        if isinstance(cell, Cell) and cell.paper is not None and cell.over is None
    }


def _curve_notes(group: PresetRuns, *, drawn: bool, timed: bool) -> list[str]:
    unseen = "no curve that all its runs recorded" if timed else "its step was not timed"
    missing = unseen if group.runs else "not run"
    return [*([] if drawn else [f"{group.preset.title}: {missing}."]), *_left_out(group)]


def _sweep_notes(group: PresetRuns) -> list[str]:
    title, broken = group.preset.title, sum(run.report.status == "diverged" for run in group.runs)
    if not group.runs:
        return [f"{title}: not run.", *_left_out(group)]
    return [*([f"{title}: {broken} of {len(group.runs)} diverged."] if broken else []), *_left_out(group)]


def _left_out(group: PresetRuns) -> list[str]:
    count = sum(len(variant.runs) for variant in group.variants)
    runs = "1 run" if count == 1 else f"{count} runs"
    return [f"{group.preset.title}: {runs} with a changed config not drawn."] if count else []
