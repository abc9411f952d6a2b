"""Run jobs in parallel, each in its own process.

A run that fails, or that the system kills for its memory, leaves the others alone, and the peak memory of a run is its
own.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Literal

from splitfg_lab.runs.environment import SIDE_BY_SIDE, side_by_side
from splitfg_lab.runs.folder import RunFolder
from splitfg_lab.runs.interrupts import stop_signals
from splitfg_lab.runs.lease import is_held_elsewhere
from splitfg_lab.runs.progress import Event, Guarded, View

_ENDINGS: Final = ("finished", "stopped", "failed", "elsewhere")
_LINE_BYTES: Final = 2**22


@dataclass(frozen=True)
class Job:
    """A run folder and the command that runs it, which prints events as JSON lines."""

    folder: RunFolder
    command: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """The end of a job. A ``stopped`` job can resume; a ``waiting`` job did not start.

    Another process, here or on another host, runs a job that is ``elsewhere``.
    ``refused`` marks a job that failed before its first step, for a reason that ``message`` explains in full.
    """

    run: str
    status: Literal["done", "diverged", "stopped", "waiting", "failed", "elsewhere"]
    message: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    refused: bool = False


def run_jobs(jobs: Sequence[Job], *, at_once: int, view: View) -> list[Outcome]:
    """Run jobs, ``at_once`` at a time, and return their outcomes in order.

    Ctrl-C, SIGTERM or SIGHUP asks the running jobs to save and stop, and starts no more; a second signal kills them.
    If several jobs run at a time, each gets one CPU thread. A view that fails is switched off.
    """
    return asyncio.run(_run_all(jobs, at_once, view))


async def _run_all(jobs: Sequence[Job], at_once: int, view: View) -> list[Outcome]:
    crew = _Crew(view, _environment(at_once, len(jobs)))
    loop = asyncio.get_running_loop()
    for number in stop_signals():
        with suppress(NotImplementedError):  # on Windows
            loop.add_signal_handler(number, crew.stop, number)
    gate = asyncio.Semaphore(at_once)
    return list(await asyncio.gather(*(crew.run(job, gate) for job in jobs)))


def _environment(at_once: int, jobs: int) -> dict[str, str]:
    single = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} if at_once > 1 else {}
    shared = max(min(at_once, jobs), side_by_side() or 1)
    return {**os.environ, **single, SIDE_BY_SIDE: str(shared)}


class _Crew:
    """The running processes."""

    def __init__(self, view: View, environment: dict[str, str]) -> None:
        self._view = Guarded(view)
        self._environment = environment
        self._working: set[asyncio.subprocess.Process] = set()
        self._stopping = self._unheard = False

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Ask all processes to save and stop; the second time, kill them."""
        for process in self._working:
            with suppress(ProcessLookupError):  # it has just ended by itself
                process.kill() if self._stopping else process.terminate()
        if not self._stopping:
            self._stopping = True
            cause = "Ctrl-C" if number == signal.SIGINT else _signal_name(number)
            text = "saving and stopping; press Ctrl-C again to stop at once"
            self._show({"event": "note", "run": cause, "text": text})

    def _show(self, event: Event) -> None:
        """Show an event; if the output cannot be written any more, ask all processes to save and stop."""
        if self._unheard:
            return
        try:
            self._view.show(event)
        except OSError:
            self._unheard = True
            if not self._stopping:
                self.stop()

    async def run(self, job: Job, gate: asyncio.Semaphore) -> Outcome:
        async with gate:
            if self._stopping:
                return Outcome(job.folder.name, "waiting")
            if is_held_elsewhere(job.folder.path):
                return Outcome(job.folder.name, "elsewhere", "another host runs it")
            try:
                ending, code = await self._work(job)
            except (OSError, ValueError) as error:  # fails this job, not the others
                return self._tell(job, Outcome(job.folder.name, "failed", _trouble(job.folder, error)))
        outcome = self._judge(job, ending, code)
        return self._tell(job, outcome) if ending is None else outcome

    def _tell(self, job: Job, outcome: Outcome) -> Outcome:
        """Show an ending that the process did not report itself."""
        event = "stopped" if outcome.status == "stopped" else "failed"
        self._show({"event": event, "run": outcome.run, "message": outcome.message} | _place(job))
        return outcome

    async def _work(self, job: Job) -> tuple[Event | None, int]:
        """Run the process, and return its last event, if it sent one, and its exit code.

        The process has ended when this method returns or raises.

        Raises:
            OSError: The process cannot be started, for example because its folder is gone.
            ValueError: The process printed a line that is too long.
        """
        with job.folder.log_path.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *job.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=self._environment,
                limit=_LINE_BYTES,
            )
        self._working.add(process)
        if self._stopping:  # the signal came while the process was being started
            with suppress(ProcessLookupError):
                process.terminate()
        try:
            return await self._listen(job, process), await process.wait()
        finally:
            self._working.discard(process)
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()

    async def _listen(self, job: Job, process: asyncio.subprocess.Process) -> Event | None:
        assert process.stdout is not None
        ending: Event | None = None
        async for line in process.stdout:
            event = _event(line)
            if event is None:
                continue
            self._show(event | _place(job))
            if event["event"] in _ENDINGS:
                ending = event
        return ending

    def _judge(self, job: Job, ending: Event | None, code: int) -> Outcome:
        name = job.folder.name
        if ending is None:
            how = f"killed by {_signal_name(-code)}" if code < 0 else f"exit code {code}"
            if self._stopping:
                asked = -code in stop_signals()
                ended = "stopped" if asked else how
                return Outcome(name, "stopped", f"{ended} before it could save; it {_after_resume(job.folder)}")
            return Outcome(name, "failed", f"{how}{_advice(job.folder, code)}")
        if ending["event"] == "finished":
            return Outcome(name, ending["status"], ending["message"], ending["metrics"])
        return Outcome(name, ending["event"], ending["message"], refused=ending.get("refused", False))


def _place(job: Job) -> Event:
    """Return the event field that distinguishes runs of the same name."""
    return {"folder": str(job.folder.path)}


def _event(line: bytes) -> Event | None:
    """Parse a line as an event; ``None`` for an incomplete line and for other output."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and {"event", "run"} <= found.keys() else None


def _signal_name(number: int) -> str:
    """Return the name of a signal; real-time signals have numbers only."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _trouble(folder: RunFolder, error: OSError | ValueError) -> str:
    """Explain why a process could not be started or followed, with the cure."""
    if not folder.path.is_dir():
        return f"its folder {folder.path} is gone: run it again to start over"
    reason = error.strerror or error if isinstance(error, OSError) else error
    return f"cannot run: {reason}; `splitfg resume {folder.path}` tries again"


def _advice(folder: RunFolder, code: int) -> str:
    """Give advice about a process that ended without a message."""
    log = f"; see {folder.log_path}" if folder.log_path.exists() and folder.log_path.stat().st_size else ""
    if code != -signal.SIGKILL:
        return log
    return f"{log}. It may have run out of memory; `splitfg resume {folder.path}` {_after_resume(folder)}"


def _after_resume(folder: RunFolder) -> str:
    return "resumes from its last checkpoint" if folder.has_checkpoint else "starts over, as there is no checkpoint yet"
