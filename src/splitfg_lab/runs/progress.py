"""What people, logs and machines see of running jobs: bars in a terminal, plain lines elsewhere, or JSON lines.

A run tells what happens to it as events, dicts with ``event`` (``started``, ``progress``, ``metrics``, ``note``,
``finished``, ``stopped``, ``failed``), ``run`` (its name) and more fields. Whoever starts runs adds ``folder``: names
are short, and runs in two places may share one.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import IO, Any, Final, Protocol, TypeAlias

Event: TypeAlias = dict[str, Any]

_PLAIN_S: Final = 10.0
"""Seconds between two plain lines about the same run."""


class View(Protocol):
    """Shows events to somebody."""

    def __enter__(self) -> View:
        """Begin to show."""

    def __exit__(self, *_: object) -> None:
        """Show no more."""

    def show(self, event: Event) -> None:
        """Show one event."""


class Guarded:
    """Shows what another view shows, until that fails: then it is switched off, with a word on standard error.

    Nothing that goes wrong in showing runs stops them. An ``OSError`` is passed on: it says that nobody can read any
    more, which is for the caller to judge.
    """

    def __init__(self, view: View) -> None:
        self._view: View | None = view

    def __enter__(self) -> Guarded:
        """Begin to show."""
        self._attempt(lambda view: view.__enter__())
        return self

    def __exit__(self, *details: object) -> None:
        """Show no more."""
        self._attempt(lambda view: view.__exit__(*details))

    def show(self, event: Event) -> None:
        """Show one event, if it still can be."""
        self._attempt(lambda view: view.show(event))

    def _attempt(self, use: Callable[[View], object]) -> None:
        if self._view is None:
            return
        try:
            use(self._view)
        except OSError:
            raise
        except Exception as error:
            self._switch_off(self._view, error)

    def _switch_off(self, view: View, error: Exception) -> None:
        self._view = None
        with suppress(Exception):  # it may fail in this too, but gives the terminal back
            view.__exit__(None, None, None)
        with suppress(OSError):
            reason = f"{type(error).__name__}: {error}"
            print(f"progress can no longer be shown ({reason}); the runs go on", file=sys.stderr, flush=True)


def key_of(event: Event) -> str:
    """What tells the events of one run from those of another."""
    return str(event.get("folder", event["run"]))


def numbers(values: Mapping[str, float]) -> str:
    """Metrics in a line: ``accuracy 0.7132  loss 0.5012``."""
    return "  ".join(f"{name} {value:.4g}" for name, value in values.items())


class JsonView:
    """One event per line, as it is."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def __enter__(self) -> JsonView:
        """Nothing to begin."""
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to end."""

    def show(self, event: Event) -> None:
        """Print the event."""
        print(json.dumps(event), file=self._file, flush=True)


@dataclass
class _Pace:
    """When and where a run was last printed, to tell its speed since."""

    time: float
    step: int


class PlainView:
    """A line when something begins or ends, and one every few seconds in between."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._paces: dict[str, _Pace] = {}

    def __enter__(self) -> PlainView:
        """Nothing to begin."""
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to end."""

    def show(self, event: Event) -> None:
        """Print a line about the event, if it deserves one."""
        text = self._progress(event) if event["event"] == "progress" else format_event(event)
        if text:
            print(f"{event['run']}  {text}", file=self._file, flush=True)

    def _progress(self, event: Event) -> str:
        now, step, steps = time.monotonic(), event["step"], event["steps"]
        pace = self._paces.setdefault(key_of(event), _Pace(now, step))
        if now - pace.time < _PLAIN_S:
            return ""
        speed = (step - pace.step) / (now - pace.time)
        self._paces[key_of(event)] = _Pace(now, step)
        left = _time_left(steps - step, speed)
        return f"step {step:,}/{steps:,}  {speed:.3g} steps/s  {left} left  {current_numbers(event)}"


def _time_left(steps: int, speed: float) -> str:
    """``0:00:25``; ``-`` if nothing moves, or nobody will live to see the end."""
    try:
        return str(timedelta(seconds=round(steps / speed)))
    except (ZeroDivisionError, OverflowError):
        return "-"


def format_event(event: Event) -> str:
    """What an event says, in a line; nothing for those that are only numbers."""
    match event:
        case {"event": "started", "step": step, "device": device}:
            return f"goes on from step {step:,} on {device}" if step else f"started on {device}"
        case {"event": "note", "text": text}:
            return str(text)
        case {"event": "finished", "status": "done", "metrics": metrics}:
            return f"done  {numbers(metrics)}"
        case {"event": "finished", "message": message} | {"event": "failed" | "stopped", "message": message}:
            return str(message)
    return ""


def current_numbers(event: Event) -> str:
    """Loss and metrics of a ``progress`` event, in a line."""
    loss = {} if event["loss"] is None else {"loss": event["loss"]}
    return numbers(loss | event["metrics"])
