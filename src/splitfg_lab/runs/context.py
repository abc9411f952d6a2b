"""What a runner is given: where to log, how to save and go on, and the books that end up in the report."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Final, Self, TypeAlias

import torch

from splitfg_lab.runs._errors import DivergedError, RunError
from splitfg_lab.runs._metrics import MetricsWriter
from splitfg_lab.runs.checkpoint import Checkpoint, save_checkpoint
from splitfg_lab.runs.environment import PeakMemory, side_by_side
from splitfg_lab.runs.folder import RunFolder
from splitfg_lab.runs.progress import Event

Emit: TypeAlias = Callable[[Event], None]
"""Takes one event on its way to whoever watches."""

_PROGRESS_S: Final = 0.1
"""Seconds between two reports of progress."""


def utc_now() -> str:
    """The time, as reports write it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass
class Books:
    """What is counted over all sessions of a run; saved with every checkpoint.

    ``warm_*`` are the first steps of each session, which compile and allocate; ``jvps`` and
    ``trunk_backward`` stay ``None`` until somebody counts them. ``side_by_side`` is the largest number of runs that
    shared the machine in any session, ``None`` if a session did not know it.
    """

    started: str = field(default_factory=utc_now)
    wall_s: float = 0.0
    steps: int = 0
    warm_steps: int = 0
    warm_s: float = 0.0
    timed_steps: int = 0
    timed_s: float = 0.0
    jvps: float | None = None
    trunk_backward: float | None = None
    peak_memory_mib: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    side_by_side: int | None = None

    @property
    def step_ms(self) -> float | None:
        """Milliseconds per step, without the warm-up where there is anything else."""
        if self.timed_steps:
            return 1e3 * self.timed_s / self.timed_steps
        return 1e3 * self.warm_s / self.warm_steps if self.warm_steps else None

    def per_step(self, total: float | None) -> float | None:
        """A count divided by the steps; ``None`` if it was not counted."""
        return None if total is None or not self.steps else total / self.steps


class RunContext:
    """One session of one run, in its folder.

    A runner is a function ``runner(config, *, seed, run) -> metrics`` that is given one of these. Most hand
    it to :func:`splitfg_lab.runs.fit`, which logs, saves and goes on from checkpoints; one that measures rather
    than trains calls :meth:`log`, :meth:`count` and :meth:`progress` itself.

    Attributes:
        device: Where to compute.
        books: What is counted over all sessions.
        restored: The state given to :meth:`save` in an earlier session; ``None`` at the beginning.
        memory: The most memory held at once.
    """

    def __init__(self, folder: RunFolder, checkpoint: Checkpoint | None, *, device: torch.device, emit: Emit) -> None:
        folder.refuse_finished()
        self.device = device
        self.memory = PeakMemory(device)
        self._folder = folder
        self._emit = emit
        saved = checkpoint.state if checkpoint is not None else {}
        self.books = Books(**saved.get("books", {}))
        if checkpoint is None:
            self.books.side_by_side = side_by_side()
        elif self.books.side_by_side is not None:
            now = side_by_side()
            self.books.side_by_side = None if now is None else max(now, self.books.side_by_side)
        self.restored: Mapping[str, Any] | None = saved.get("state")
        self._metrics = MetricsWriter(folder.metrics_path, keep=saved.get("metrics_bytes", 0))
        self._began = time.perf_counter() - self.books.wall_s
        self._progress_due = 0.0
        self._warm = False
        self._claimed = False
        if checkpoint is not None and checkpoint.note:
            self.note(f"fell back to the previous checkpoint: {checkpoint.note}")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write numbers of one step to ``metrics.jsonl``.

        Raises:
            DivergedError: One of them is not finite.
        """
        require_finite(step, values)
        line = {"step": step, "wall_s": round(self.wall_s(), 3), **values}
        self._metrics.append(line)
        self.emit("metrics", **line)

    def progress(self, step: int, steps: int, *, loss: float | None = None) -> None:
        """Say how far the run is; cheap enough to call at every step."""
        now = time.perf_counter()
        if now >= self._progress_due or step == steps:
            self._progress_due = now + _PROGRESS_S
            self.emit("progress", step=step, steps=steps, loss=loss, metrics=self.books.metrics)

    def count(
        self,
        *,
        steps: int = 0,
        seconds: float = 0.0,
        jvps: float | None = None,
        trunk_backward: float | None = None,
    ) -> None:
        """Add to the books: steps and the seconds they took, JVPs and reverse passes through the trunk."""
        books = self.books
        books.steps += steps
        if self._warm:
            books.timed_steps += steps
            books.timed_s += seconds
        else:
            books.warm_steps += steps
            books.warm_s += seconds
        self._warm = True
        if jvps is not None:
            books.jvps = (books.jvps or 0.0) + jvps
        if trunk_backward is not None:
            books.trunk_backward = (books.trunk_backward or 0.0) + trunk_backward

    def save(self, state: Mapping[str, Any]) -> None:
        """Write a checkpoint that a later session finds in ``restored``, books and logged lines included.

        Raises:
            CheckpointError: It cannot be written; the last one is intact.
        """
        self.close_books()
        saved = {
            "device": self.device.type,
            "threads": torch.get_num_threads(),
            "metrics_bytes": self._metrics.sync(),
            "books": asdict(self.books),
            "state": state,
        }
        save_checkpoint(self._folder.path, saved)

    def claim_checkpoints(self) -> None:
        """Say that the caller alone saves and restores in this run.

        Raises:
            RunError: Somebody has said so before; on resuming, neither could tell whose state it finds.
        """
        if self._claimed:
            raise RunError("a run keeps one checkpoint, so it can be used for one fit; make two runs of it")
        self._claimed = True

    def close_books(self) -> None:
        """Bring wall time and peak memory up to date."""
        self.books.wall_s = self.wall_s()
        self.books.peak_memory_mib = max(self.books.peak_memory_mib, self.memory.mib())

    def note(self, text: str) -> None:
        """Tell whoever watches something worth knowing."""
        self.emit("note", text=text)

    def emit(self, event: str, **fields: Any) -> None:
        """Send an event of this run to whoever watches."""
        self._emit({"event": event, "run": self._folder.name, **fields})

    def wall_s(self) -> float:
        """Seconds spent on the run, earlier sessions included."""
        return time.perf_counter() - self._began

    def __enter__(self) -> Self:
        """Use as a context manager to close the metrics file."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the metrics file."""
        self._metrics.close()


def require_finite(step: int, values: Mapping[str, float]) -> None:
    """Raise a :class:`DivergedError` that names every value which is not finite."""
    bad = [f"{name} is {value}" for name, value in values.items() if not math.isfinite(value)]
    if bad:
        raise DivergedError(step, ", ".join(bad))
