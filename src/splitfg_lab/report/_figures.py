"""Figures ready for the page: the drawing as SVG, and notes on everything it leaves out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from splitfg_lab.experiments.spec import Confusion, Curves, Experiment, Figure, Filters, Sweep
from splitfg_lab.report._groups import PresetRuns
from splitfg_lab.report._matrices import confusions, draw_confusions, draw_filters, filter_rows
from splitfg_lab.report._plots import all_references, plot, visible_references
from splitfg_lab.report._series import Drawing, curve_drawing, for_logarithms, sweep_drawing
from splitfg_lab.report._step_times import step_time_note, step_time_problems
from splitfg_lab.report._svg import render
from splitfg_lab.report._times import timing_problems
from splitfg_lab.report._views import ExperimentView

_NO_MATRIX = "No run recorded the matrices that this figure needs."


@dataclass(frozen=True)
class FigureView:
    """A figure ready for the page: ``svg`` is ``None`` if there is nothing to draw."""

    figure: Figure
    svg: str | None
    notes: tuple[str, ...]


def view_figures(view: ExperimentView) -> list[FigureView]:
    """Draw all figures of an experiment."""
    groups = {**view.everywhere, **view.groups}
    return [view_figure(figure, view.experiment, groups) for figure in view.experiment.figures]


def view_figure(figure: Figure, experiment: Experiment, groups: Mapping[str, PresetRuns]) -> FigureView:
    """Draw a figure from the runs of its experiment, by preset, and of others, as ``EXPERIMENT/PRESET``."""
    salt = f"{experiment.name}-{figure.key}"
    if isinstance(figure, Confusion):
        return _view_confusion(figure, groups, salt)
    if isinstance(figure, Filters):
        return _view_filters(figure, groups, salt)
    return _view_lines(figure, experiment, groups, salt)


def _view_lines(
    figure: Curves | Sweep, experiment: Experiment, groups: Mapping[str, PresetRuns], salt: str
) -> FigureView:
    problems = _time_problems(figure, groups)
    if problems:
        return FigureView(figure, None, (f"Times cannot be compared: {'; '.join(problems)}.",))
    drawing = _lines(figure, experiment, groups)
    drawing = for_logarithms(drawing, x=figure.log_x and not drawing.categorical, y=figure.log_y)
    has_ours = any(series.style != "paper" for series in drawing.series)
    draw = partial(plot, figure=figure, drawing=drawing)
    svg = render(draw, label=figure.title, salt=salt) if has_ours else None
    shown = visible_references(figure)
    hidden = [label for label, value in all_references(figure) if (label, value) not in shown]
    left_out = (*drawing.notes, *(f"{label}: not above zero, left out." for label in hidden))
    return FigureView(figure, svg, (*_time_notes(figure, groups), *left_out))


def _lines(figure: Curves | Sweep, experiment: Experiment, groups: Mapping[str, PresetRuns]) -> Drawing:
    if isinstance(figure, Curves):
        return curve_drawing(figure, groups)
    return sweep_drawing(figure, experiment, groups)


def _time_problems(figure: Curves | Sweep, groups: Mapping[str, PresetRuns]) -> list[str]:
    if isinstance(figure, Curves) and figure.step_ms:
        return step_time_problems(figure, groups)
    if isinstance(figure, Curves) and figure.x == "wall_s":
        return timing_problems([run for name in figure.presets for run in groups[name].runs])
    return []


def _time_notes(figure: Curves | Sweep, groups: Mapping[str, PresetRuns]) -> list[str]:
    return [step_time_note(figure, groups)] if isinstance(figure, Curves) and figure.step_ms else []


def _view_confusion(figure: Confusion, groups: Mapping[str, PresetRuns], salt: str) -> FigureView:
    found = confusions(figure, groups)
    if not found:
        return FigureView(figure, None, (_NO_MATRIX,))
    draw = partial(draw_confusions, matrices=found, classes=figure.classes)
    return FigureView(figure, render(draw, label=figure.title, salt=salt), _missing(figure, groups, found))


def _view_filters(figure: Filters, groups: Mapping[str, PresetRuns], salt: str) -> FigureView:
    found = filter_rows(figure, groups)
    if not found:
        return FigureView(figure, None, (_NO_MATRIX,))
    draw = partial(draw_filters, rows=found)
    return FigureView(figure, render(draw, label=figure.title, salt=salt), _missing(figure, groups, found))


def _missing(
    figure: Confusion | Filters, groups: Mapping[str, PresetRuns], found: Mapping[str, object]
) -> tuple[str, ...]:
    titles = [groups[name].preset.title for name in figure.presets]
    return tuple(f"{title}: no run recorded it." for title in titles if title not in found)
