"""Progress bars: one per running job, one for its current phase, and one for all jobs.

A line always shows name, bar, steps, speed and time left; loss and metrics get the rest of the terminal's width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID
from rich.table import Column
from rich.text import Text

from splitfg_lab.runs.progress import (
    Event,
    Guarded,
    JsonView,
    PlainView,
    SharedFailures,
    View,
    current_numbers,
    format_event,
    key_of,
)

_COLOURS: Final = {"finished": "green", "stopped": "yellow", "failed": "red", "note": "yellow"}
_SPEED_S: Final = 300.0
"""Seconds over which a speed is averaged: steps may take minutes."""


def choose_view(console: Console, *, total: int, as_json: bool) -> View:
    """Return JSON lines if asked for, bars if the console is a terminal, plain lines otherwise."""
    if as_json:
        return JsonView(console.file)
    return SharedFailures(Guarded(BarView(console, total)) if console.is_terminal else PlainView(console.file))


@dataclass
class _Run:
    """The bars of a running job."""

    bar: TaskID
    counted: bool = False
    phase: TaskID | None = None


class BarView:
    """Bars for ``total`` runs; a finished run leaves a line above them."""

    def __init__(self, console: Console, total: int) -> None:
        self._bars = Progress(console=console, transient=True, speed_estimate_period=_SPEED_S)
        self._bars.columns = _columns(self._bars)
        self._runs: dict[str, _Run] = {}
        self._overall = self._bars.add_task(f"{total} runs", total=total, detail="") if total > 1 else None

    def __enter__(self) -> BarView:
        """Draw the bars."""
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the bars; the lines stay."""
        self._bars.stop()

    def show(self, event: Event) -> None:
        """Draw the event."""
        kind, run, key = event["event"], event["run"], key_of(event)
        if kind == "started":
            if key in self._runs:  # torchrun has restarted it
                self._close(key)
            self._runs[key] = _Run(self._bars.add_task(run, total=None, detail="starting"))
        elif kind == "progress":
            self._advance(self._runs[key], event)
        elif kind == "phase":
            self._advance_phase(self._runs[key], event)
        elif kind in ("finished", "stopped", "failed") or (kind == "elsewhere" and key in self._runs):
            self._close(key)
        line = format_event(event)
        if line and not (kind == "started" and event["step"] == 0):
            colour = "red" if event.get("status") == "diverged" else _COLOURS.get(kind, "")
            self._bars.console.print(Text.assemble((run, "bold"), "  ", (line, colour)))

    def _advance(self, run: _Run, event: Event) -> None:
        self._end_phase(run)
        if not run.counted:
            # the clock of the speed starts here: steps of earlier sessions do not count
            self._bars.reset(run.bar, total=event["steps"], completed=event["step"])
            run.counted = True
        self._bars.update(run.bar, completed=event["step"], detail=current_numbers(event))

    def _advance_phase(self, run: _Run, event: Event) -> None:
        if event["done"] == event["total"]:
            self._end_phase(run)
        elif run.phase is None:
            run.phase = self._bars.add_task(f"  {event['name']}", total=event["total"], detail="")
        else:
            self._bars.update(run.phase, completed=event["done"])

    def _end_phase(self, run: _Run) -> None:
        if run.phase is not None:
            self._bars.remove_task(run.phase)
            run.phase = None

    def _close(self, key: str) -> None:
        if key in self._runs:
            run = self._runs.pop(key)
            self._end_phase(run)
            self._bars.remove_task(run.bar)
        if self._overall is not None:
            self._bars.advance(self._overall)


def _columns(bars: Progress) -> tuple[ProgressColumn, ...]:
    width = bars.console.width
    name, bar = min(40, max(12, width * 28 // 100)), min(30, max(5, width // 10))
    return (
        _NameColumn(name),
        BarColumn(bar_width=bar),
        _StepColumn(),
        _SpeedColumn(),
        _EtaColumn(),
        _Details(bars, name + bar),
    )


class _TextColumn(ProgressColumn):
    """A column of one line that rich does not shrink."""

    def __init__(self) -> None:
        super().__init__(table_column=Column(no_wrap=True))


class _NameColumn(_TextColumn):
    """The end of a run's name, which holds preset and seed."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self._width = width

    def render(self, task: Task) -> Text:
        """Draw it."""
        return Text(shorten(task.description, self._width).ljust(self._width), "bold")


class _StepColumn(_TextColumn):
    """``1,200/5,000``."""

    def render(self, task: Task) -> Text:
        """Draw it."""
        return Text(_steps(task), justify="right")


class _SpeedColumn(_TextColumn):
    """``118/s``, or ``5.3 s each`` for slow steps."""

    def render(self, task: Task) -> Text:
        """Draw it."""
        return Text(_speed(task), justify="right")


class _EtaColumn(_TextColumn):
    """The time left: ``0:25``, ``3:20:00``, ``5 d 2 h``."""

    def render(self, task: Task) -> Text:
        """Draw it."""
        return Text(_eta(task), "cyan", justify="right")


class _Details(_TextColumn):
    """As many of loss and metrics as fit next to the other columns."""

    def __init__(self, bars: Progress, taken: int) -> None:
        super().__init__()
        self._bars, self._taken = bars, taken

    def render(self, task: Task) -> Text:
        """Draw it."""
        texts = (_steps, _speed, _eta)
        widths = [max((len(text(t)) for t in self._bars.tasks), default=0) for text in texts]
        gaps = len(texts) + 2
        return Text(
            fit_items(task.fields["detail"], self._bars.console.width - self._taken - sum(widths) - gaps), "cyan"
        )


def shorten(name: str, width: int) -> str:
    """Cut the beginning of a name, so that its end stays readable."""
    return name if len(name) <= width else f"…{name[len(name) - width + 1 :]}"


def fit_items(text: str, width: int) -> str:
    """Keep the leading items of a text, separated by two spaces, that fit into a width; no item is cut."""
    kept = ""
    for item in text.split("  "):
        longer = f"{kept}  {item}" if kept else item
        if len(longer) > width:
            break
        kept = longer
    return kept


def _steps(task: Task) -> str:
    return "" if task.total is None else f"{task.completed:,.0f}/{task.total:,.0f}"


def _speed(task: Task) -> str:
    speed = task.speed
    if task.total is None or not speed:
        return ""
    if speed < 1:
        return f"{1 / speed:.2g} s each" if speed > 0.01 else f"{1 / speed:.0f} s each"
    return f"{speed:.3g}/s" if speed < 100 else f"{speed:,.0f}/s"


def _eta(task: Task) -> str:
    seconds = task.time_remaining
    if task.total is None or seconds is None:
        return "" if task.total is None else "-:--"
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24:,} d {hours % 24} h"
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
