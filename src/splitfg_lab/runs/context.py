"""The context of a run: where a runner logs, saves and reports, and what it has counted so far."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias

import torch

from splitfg.types import Learner
from splitfg_lab.runs._books import Books
from splitfg_lab.runs._errors import DivergedError, PhaseStoppedError, RunError
from splitfg_lab.runs._metrics import MetricsWriter
from splitfg_lab.runs.checkpoint import Checkpoint, save_checkpoint
from splitfg_lab.runs.digests import config_digest, require_same_data
from splitfg_lab.runs.environment import PeakMemory, side_by_side
from splitfg_lab.runs.folder import RunFolder, RunIdentity
from splitfg_lab.runs.interrupts import StopRequest, stop_requests
from splitfg_lab.runs.lease import Lease
from splitfg_lab.runs.progress import Event
from splitfg_lab.runs.record import Matrix

if TYPE_CHECKING:
    from splitfg.distributed import Ranks
    from splitfg.estimators import Estimator

Emit: TypeAlias = Callable[[Event], None]
"""Receives the events of a run."""

Advance: TypeAlias = Callable[[], None]
"""Reports that one part of a phase is done."""

_PROGRESS_S: Final = 0.1
"""Seconds between two reports of progress."""


class RunContext:
    """One session of one run, in its folder.

    A runner is a function ``runner(config, *, seed, run) -> metrics``. Most runners pass ``run`` to
    :func:`splitfg_lab.runs.fit`, which logs, saves and resumes; a runner that measures passes it to
    :func:`splitfg_lab.runs.draw`, or calls :meth:`log`, :meth:`count` and :meth:`progress` itself.

    Args:
        folder: The run folder.
        checkpoint: The checkpoint from which to resume; ``None`` to begin.
        device: The device to compute on.
        emit: Receives the events.
        identity: The contents of ``config.json``, which checkpoints store.
        ranks: The processes that share the run; the first of them writes its files and answers signals. ``None`` for
            one process.
        lease: The folder's lease, which must hold whenever a checkpoint is written.

    Attributes:
        device: The device to compute on.
        books: Counts over all sessions.
        restored: The state that an earlier session passed to :meth:`save`; ``None`` at the beginning.
        memory: Peak memory so far.
        data: Digests of the data that the run reads, by name.
        matrices: Matrices for the report, from :meth:`record_matrix`.
    """

    def __init__(
        self,
        folder: RunFolder,
        checkpoint: Checkpoint | None,
        *,
        device: torch.device,
        emit: Emit,
        identity: RunIdentity | None = None,
        ranks: Ranks | None = None,
        lease: Lease | None = None,
    ) -> None:
        folder.require_unfinished()
        self.ranks, self._lease = ranks, lease
        self.leads = ranks is None or ranks.is_first
        self._spread = False
        self.device = device
        self.memory = PeakMemory(device)
        self.data: dict[str, str] = {}
        self._folder = folder
        self._emit = emit
        self._identity = identity
        saved = checkpoint.state if checkpoint is not None else {}
        self.books = Books(**saved.get("books", {}))
        if checkpoint is None:
            self.books.side_by_side = side_by_side()
        elif self.books.side_by_side is not None:
            now = side_by_side()
            self.books.side_by_side = None if now is None else max(now, self.books.side_by_side)
        self.restored: Mapping[str, Any] | None = saved.get("state")
        self._data_began: Mapping[str, str] = saved.get("data", {})
        self.matrices: dict[str, Matrix] = {}
        keep = saved.get("metrics_bytes", 0)
        self._metrics = MetricsWriter(folder.metrics_path, keep=keep) if self.leads else None
        self._began = time.perf_counter() - self.books.wall_s
        self._progress_due = self._phase_due = 0.0
        self._warm = False
        self._claimed = False
        self._stop: StopRequest | None = None
        if checkpoint is not None and checkpoint.note:
            self.note(f"uses the previous checkpoint: {checkpoint.note}")

    def use_data(self, digests: Mapping[str, str]) -> None:
        """Record the digests of the data that the run reads, by name; checkpoints and the report store them.

        Raises:
            RunError: The run began with other data; the error shows both digests.
        """
        self.data.update(digests)
        require_same_data(self._data_began, self.data)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Append the numbers of one step to ``metrics.jsonl``.

        Raises:
            DivergedError: One of them is not finite.
            LostLeaseError: Another host took the run over while this one gave no sign of life.
        """
        require_finite(step, values)
        line = {"step": step, "wall_s": round(self.wall_s(), 3), **values}
        if self._lease is not None:
            self._lease.check()
        if self._metrics is not None:
            self._metrics.append(line)
        self.emit("metrics", **line)

    def progress(self, step: int, steps: int, *, loss: float | None = None) -> None:
        """Report how many steps are done; cheap enough to call at every step."""
        now = time.perf_counter()
        if now >= self._progress_due or step == steps:
            self._progress_due = now + _PROGRESS_S
            self.emit("progress", step=step, steps=steps, loss=loss, metrics=self.books.metrics)

    @contextmanager
    def phase(self, name: str, total: int) -> Iterator[Advance]:
        """Show a progress bar for a part of a run that is not training, and let Ctrl-C interrupt it.

        Yields a function to call after each of the ``total`` parts. Within :func:`fit` it raises
        :class:`PhaseStoppedError` if a signal asks the run to stop; ``fit`` then saves, and repeats the evaluation on
        resuming.

        Example::

            with run.phase("validation", len(batches)) as advance:
                for x, y in batches:
                    ...
                    advance()
        """
        done = 0

        def advance() -> None:
            nonlocal done
            done += 1
            now = time.perf_counter()
            if now >= self._phase_due:
                self._phase_due = now + _PROGRESS_S
                self.emit("phase", name=name, done=done, total=total)
            if self._stop is not None and self._stop.made:
                raise PhaseStoppedError(f"stopped during {name}")

        self.emit("phase", name=name, done=0, total=total)
        try:
            yield advance
        finally:
            self.emit("phase", name=name, done=total, total=total)

    @contextmanager
    def deferring_stops(self) -> Iterator[StopRequest]:
        """Collect stop signals in a request, which the caller and :meth:`phase` answer.

        Of several processes the first one answers; the others end when it is gone.
        """
        if not self.leads:
            with stop_requests():
                yield StopRequest()
            return
        with stop_requests() as self._stop:
            try:
                yield self._stop
            finally:
                self._stop = None

    def count(
        self,
        *,
        steps: int = 0,
        seconds: float = 0.0,
        jvps: float | None = None,
        trunk_backward: float | None = None,
        block_backward: float | None = None,
    ) -> None:
        """Add steps, the seconds they took, JVPs and reverse passes through the trunk or its blocks to the counts."""
        self.books.count(steps, seconds, warm=self._warm)
        self.books.add(jvps=jvps, trunk_backward=trunk_backward, block_backward=block_backward)
        self._warm = True

    def record_matrix(self, name: str, rows: Sequence[Sequence[float]]) -> None:
        """Keep a small matrix for the run's report, for figures; a matrix of the same name is replaced.

        Raises:
            ValueError: The rows differ in length, or a number is not finite.
        """
        if len({len(row) for row in rows}) > 1 or not all(math.isfinite(x) for row in rows for x in row):
            raise ValueError(f"the matrix {name!r} must have rows of one length with finite numbers")
        self.matrices[name] = tuple(tuple(row) for row in rows)

    def save(self, state: Mapping[str, Any]) -> None:
        """Write a checkpoint with ``state``, the counts, and digests of config and data.

        The next session finds ``state`` in ``restored``.

        Raises:
            CheckpointError: The checkpoint cannot be written; the last one is intact.
        """
        self.close_books()
        if self._metrics is None:
            return
        if self._lease is not None:
            self._lease.require()
        saved = {
            "device": self.device.type,
            "threads": torch.get_num_threads(),
            "metrics_bytes": self._metrics.sync(),
            "books": asdict(self.books),
            "data": dict(self.data),
            "state": state,
        }
        if self._identity is not None:
            saved["run"] = asdict(self._identity)
            saved["config_digest"] = config_digest(self._identity.config)
        save_checkpoint(self._folder.path, saved)

    def spread(self, estimator: Estimator) -> Estimator:
        """Return the estimator for a learner whose batches are whole: with several processes, each takes its rows."""
        if self.ranks is None:
            return estimator
        from splitfg.distributed import DistributedEstimator

        self._spread = True
        return DistributedEstimator(estimator, self.ranks, whole_batches=True)

    def compare(self, learner: Learner) -> None:
        """Compare the model of a learner between the processes of the run; does nothing with one process.

        Raises:
            SplitError: In all processes, if a parameter differs.
        """
        if self.ranks is not None:
            from splitfg.distributed import check_replicas

            check_replicas(self.ranks, dict(learner.state_dict()["model"]))

    def claim_checkpoints(self) -> None:
        """Reserve the run's one checkpoint for the caller.

        Raises:
            RunError: It is reserved already: on resuming, two callers could not tell their states apart. Or several
                processes share the run, and its runner does not divide the work.
        """
        if self.ranks is not None and not self._spread:
            raise RunError("this preset runs in one process: leave --ranks out, or start it without torchrun")
        if self._claimed:
            raise RunError("a run has one checkpoint, so it can call fit or draw once: make two runs of it")
        self._claimed = True

    def close_books(self) -> None:
        """Update wall time and peak memory."""
        self.books.wall_s = self.wall_s()
        self.books.peak_memory_mib = max(self.books.peak_memory_mib, self.memory.mib())

    def note(self, text: str) -> None:
        """Show a sentence to the user."""
        self.emit("note", text=text)

    def emit(self, event: str, **fields: Any) -> None:
        """Send an event of this run."""
        if self.leads:
            self._emit({"event": event, "run": self._folder.name, **fields})

    def wall_s(self) -> float:
        """Return the seconds spent on the run, earlier sessions included."""
        return time.perf_counter() - self._began

    def __enter__(self) -> Self:
        """Return this context."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the metrics file."""
        if self._metrics is not None:
            self._metrics.close()


def require_finite(step: int, values: Mapping[str, float]) -> None:
    """Raise a :class:`DivergedError` that names every value that is not finite."""
    bad = [f"{name} is {value}" for name, value in values.items() if not math.isfinite(value)]
    if bad:
        raise DivergedError(step, ", ".join(bad))
