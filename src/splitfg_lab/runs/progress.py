"""Views of running jobs: plain lines and JSON lines; :mod:`splitfg_lab.runs.bars` adds progress bars.

A run emits events, dicts with ``event`` (``started``, ``progress``, ``phase``, ``metrics``, ``note``, ``finished``,
``stopped``, ``failed``), ``run`` (its name) and more fields. The process that starts runs adds ``folder``, because runs
in two folders may share a name.
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
    """Shows events."""

    def __enter__(self) -> View:
        """Start the view."""

    def __exit__(self, *_: object) -> None:
        """Close the view."""

    def show(self, event: Event) -> None:
        """Show one event."""


class Guarded:
    """Pass events to another view, and switch it off with a message on standard error if it fails.

    A bug in a view must not stop the runs. An ``OSError`` passes through: the output cannot be written, and the caller
    decides what to do.
    """

    def __init__(self, view: View) -> None:
        self._view: View | None = view

    def __enter__(self) -> Guarded:
        """Start the view."""
        self._attempt(lambda view: view.__enter__())
        return self

    def __exit__(self, *details: object) -> None:
        """Close the view."""
        self._attempt(lambda view: view.__exit__(*details))

    def show(self, event: Event) -> None:
        """Show one event."""
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
        with suppress(Exception):  # closing may fail too, but it restores the terminal
            view.__exit__(None, None, None)
        with suppress(OSError):
            reason = f"{type(error).__name__}: {error}"
            print(f"cannot show progress any more ({reason}); the runs continue", file=sys.stderr, flush=True)


class SharedFailures:
    """Pass events to another view, but show a failure message only for the first run that has it.

    A missing data set fails every run that needs it with the same words. The caller names the other runs afterwards.
    """

    def __init__(self, view: View) -> None:
        self._view = view
        self._first: dict[str, str] = {}

    def __enter__(self) -> SharedFailures:
        """Start the view."""
        self._view.__enter__()
        return self

    def __exit__(self, *details: object) -> None:
        """Close the view."""
        self._view.__exit__(*details)

    def show(self, event: Event) -> None:
        """Show one event, a repeated failure without its message."""
        if event["event"] == "failed" and event["message"]:
            run = key_of(event)
            if self._first.setdefault(event["message"], run) != run:
                event = event | {"message": "", "log": ""}
        self._view.show(event)


def key_of(event: Event) -> str:
    """Return a key that distinguishes the runs of events."""
    return str(event.get("folder", event["run"]))


def numbers(values: Mapping[str, float]) -> str:
    """Write metrics in a line: ``accuracy 0.7132  loss 0.5012``."""
    return "  ".join(f"{name} {value:.4g}" for name, value in values.items())


class JsonView:
    """Print each event as a line of JSON."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def __enter__(self) -> JsonView:
        """Return this view."""
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing."""

    def show(self, event: Event) -> None:
        """Print the event."""
        print(json.dumps(event), file=self._file, flush=True)


@dataclass
class _Pace:
    """Time and step of the last line about a run, to compute its speed since."""

    time: float
    step: int


class PlainView:
    """Print a line when a run starts or ends, and one every few seconds in between."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._paces: dict[str, _Pace] = {}

    def __enter__(self) -> PlainView:
        """Return this view."""
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing."""

    def show(self, event: Event) -> None:
        """Print a line about the event, unless it follows another one too closely."""
        text = self._line(event)
        if text:
            print(f"{event['run']}  {text}", file=self._file, flush=True)

    def _line(self, event: Event) -> str:
        match event:
            case {"event": "progress", "step": step, "steps": steps}:
                speed = self._speed(key_of(event), step)
                if speed is None:
                    return ""
                left = _time_left(steps - step, speed)
                return f"step {step:,}/{steps:,}  {speed:.3g} steps/s  {left} left  {current_numbers(event)}"
            case {"event": "phase", "name": name, "done": done, "total": total}:
                speed = self._speed(f"{key_of(event)} {name}", done)
                return "" if speed is None else f"{name} {done:,}/{total:,}  {_time_left(total - done, speed)} left"
        return format_event(event)

    def _speed(self, key: str, done: int) -> float | None:
        """Return the speed since the last line; ``None`` if no line is due."""
        now = time.monotonic()
        pace = self._paces.setdefault(key, _Pace(now, done))
        if done < pace.step:  # the next evaluation begins
            pace = self._paces[key] = _Pace(now, done)
        if now - pace.time < _PLAIN_S:
            return None
        self._paces[key] = _Pace(now, done)
        return (done - pace.step) / (now - pace.time)


def _time_left(steps: int, speed: float) -> str:
    """Return the time left as ``0:00:25``; ``-`` without progress or if it overflows."""
    try:
        return str(timedelta(seconds=round(steps / speed)))
    except (ZeroDivisionError, OverflowError):
        return "-"


def format_event(event: Event) -> str:
    """Write an event as a line; empty for events that hold only numbers."""
    match event:
        case {"event": "started", "step": step, "device": device}:
            return f"resumes from step {step:,} on {device}" if step else f"started on {device}"
        case {"event": "note", "text": text}:
            return str(text)
        case {"event": "finished", "status": "done", "metrics": metrics}:
            return f"done  {numbers(metrics)}"
        case {"event": "failed", "message": message, "log": log} if log:
            return f"{message}; see {log}"
        case {"event": "finished", "message": message} | {
            "event": "failed" | "stopped" | "elsewhere",
            "message": message,
        }:
            return str(message)
    return ""


def current_numbers(event: Event) -> str:
    """Write loss and metrics of a ``progress`` event in a line."""
    loss = {} if event["loss"] is None else {"loss": event["loss"]}
    return numbers(loss | event["metrics"])
