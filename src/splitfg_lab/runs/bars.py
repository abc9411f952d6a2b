"""Progress bars: one per running job with speed, time left, loss and current metrics, and one for all together."""

from __future__ import annotations

from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from splitfg_lab.runs.progress import Event, Guarded, JsonView, PlainView, View, current_numbers, format_event, key_of

_COLOURS: Final = {"finished": "green", "stopped": "yellow", "failed": "red", "note": "yellow"}


def choose_view(console: Console, *, total: int, as_json: bool) -> View:
    """JSON lines if asked for, bars if the console is a terminal, plain lines otherwise."""
    if as_json:
        return JsonView(console.file)
    return Guarded(BarView(console, total)) if console.is_terminal else PlainView(console.file)


class BarView:
    """Bars for ``total`` runs, as they come and go; what ended stays as a line above them."""

    def __init__(self, console: Console, total: int) -> None:
        self._name_width = max(18, console.width // 4)
        self._bars = Progress(
            TextColumn("{task.description}", style="bold", table_column=Column(no_wrap=True)),
            BarColumn(bar_width=console.width // 8),
            _StepColumn(table_column=Column(no_wrap=True)),
            TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[detail]}", style="cyan", table_column=Column(no_wrap=True)),
            console=console,
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}
        self._counted: set[str] = set()
        self._overall = self._bars.add_task(f"{total} runs", total=total, detail="") if total > 1 else None

    def __enter__(self) -> BarView:
        """Draw the bars."""
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the lines, without bars."""
        self._bars.stop()

    def show(self, event: Event) -> None:
        """Draw the event."""
        kind, run, key = event["event"], event["run"], key_of(event)
        if kind == "started":
            name = _shorten(run, self._name_width)
            self._tasks[key] = self._bars.add_task(name, total=None, detail="starting")
        elif kind == "progress":
            self._advance(key, event)
        elif kind in ("finished", "stopped", "failed"):
            self._close(key)
        line = format_event(event)
        if line and not (kind == "started" and event["step"] == 0):
            colour = "red" if event.get("status") == "diverged" else _COLOURS.get(kind, "")
            self._bars.console.print(Text.assemble((run, "bold"), "  ", (line, colour)))

    def _advance(self, key: str, event: Event) -> None:
        task = self._tasks[key]
        if key not in self._counted:
            # the clock of the speed starts here: steps of earlier sessions do not count
            self._bars.reset(task, total=event["steps"], completed=event["step"])
            self._counted.add(key)
        self._bars.update(task, completed=event["step"], detail=current_numbers(event))

    def _close(self, key: str) -> None:
        if key in self._tasks:
            self._bars.remove_task(self._tasks.pop(key))
        if self._overall is not None:
            self._bars.advance(self._overall)


def _shorten(name: str, width: int) -> str:
    """A name with its middle left out, so that experiment and seed stay readable."""
    if len(name) <= width:
        return name
    tail = name[-width // 3 :]
    return f"{name[: width - len(tail) - 1]}…{tail}"


class _StepColumn(ProgressColumn):
    """``1,200/5,000  118/s``."""

    def render(self, task: Task) -> Text:
        """Draw it."""
        if task.total is None:
            return Text("")
        speed = f"  {task.speed:.3g}/s" if task.speed else ""
        return Text(f"{task.completed:,.0f}/{task.total:,.0f}{speed}")
