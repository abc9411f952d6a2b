"""Many runs, a few at a time, each in a process of its own.

A process per run keeps them apart: one that fails, or is killed for its memory, does not take the others with it, and
the peak memory of a run is its own.
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
from splitfg_lab.runs.progress import Event, Guarded, View

_ENDINGS: Final = ("finished", "stopped", "failed")
_LINE_BYTES: Final = 2**22


@dataclass(frozen=True)
class Job:
    """A run to make: its folder and the command that makes it, which prints events as JSON lines."""

    folder: RunFolder
    command: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """How a job ended; ``stopped`` ones go on where they were, ``waiting`` ones were never started.

    ``refused`` ones failed before their first step, for a reason that ``message`` gives in full.
    """

    run: str
    status: Literal["done", "diverged", "stopped", "waiting", "failed"]
    message: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    refused: bool = False


def run_jobs(jobs: Sequence[Job], *, at_once: int, view: View) -> list[Outcome]:
    """Run jobs, ``at_once`` at a time; how each of them ended, in their order.

    Ctrl-C or SIGTERM asks the running ones to save and stop, and starts no more; a second one kills them.
    With more than one at a time each gets a single CPU thread. A view that fails is switched off.
    """
    return asyncio.run(_run_all(jobs, at_once, view))


async def _run_all(jobs: Sequence[Job], at_once: int, view: View) -> list[Outcome]:
    crew = _Crew(view, _environment(at_once, len(jobs)))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, crew.stop)
    gate = asyncio.Semaphore(at_once)
    return list(await asyncio.gather(*(crew.run(job, gate) for job in jobs)))


def _environment(at_once: int, jobs: int) -> dict[str, str]:
    single = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} if at_once > 1 else {}
    shared = max(min(at_once, jobs), side_by_side() or 1)
    return {**os.environ, **single, SIDE_BY_SIDE: str(shared)}


class _Crew:
    """The processes at work."""

    def __init__(self, view: View, environment: dict[str, str]) -> None:
        self._view = Guarded(view)
        self._environment = environment
        self._working: set[asyncio.subprocess.Process] = set()
        self._stopping = self._unheard = False

    def stop(self) -> None:
        """Ask everybody to save and stop; the second time, do not ask."""
        for process in self._working:
            with suppress(ProcessLookupError):  # it has just ended by itself
                process.kill() if self._stopping else process.terminate()
        if not self._stopping:
            self._stopping = True
            self._show({"event": "note", "run": "Ctrl-C", "text": "saving; once more to stop without"})

    def _show(self, event: Event) -> None:
        """Hand an event to the view; when that cannot be written to any more, all save and stop."""
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
            try:
                ending, code = await self._work(job)
            except (OSError, ValueError) as error:  # this job's trouble, not that of the others
                return self._tell(job, Outcome(job.folder.name, "failed", _trouble(job.folder, error)))
        outcome = self._judge(job, ending, code)
        return self._tell(job, outcome) if ending is None else outcome

    def _tell(self, job: Job, outcome: Outcome) -> Outcome:
        """Show an ending that the process did not tell itself."""
        event = "stopped" if outcome.status == "stopped" else "failed"
        self._show({"event": event, "run": outcome.run, "message": outcome.message} | _place(job))
        return outcome

    async def _work(self, job: Job) -> tuple[Event | None, int]:
        """Run the process; the event it ended with, if it came to that, and its exit code.

        Raises:
            OSError: It cannot be started: its folder is gone, say.
            ValueError: It printed a line beyond all bounds. Whatever is raised, the process is ended.
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
        if self._stopping:  # asked while the process was being made
            with suppress(ProcessLookupError):
                process.terminate()
        try:
            return await self._listen(job, process), await process.wait()
        finally:
            self._working.discard(process)
            if process.returncode is None:  # nobody listens to it any more
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
                return Outcome(name, "stopped", f"{how} before it could save; its last checkpoint is intact")
            return Outcome(name, "failed", f"{how}{_advice(job.folder, code)}")
        if ending["event"] == "finished":
            return Outcome(name, ending["status"], ending["message"], ending["metrics"])
        return Outcome(name, ending["event"], ending["message"], refused=ending.get("refused", False))


def _place(job: Job) -> Event:
    """The field of an event that tells runs apart."""
    return {"folder": str(job.folder.path)}


def _event(line: bytes) -> Event | None:
    """The event that a line tells; ``None`` for a torn line, and for anything else that was printed."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and {"event", "run"} <= found.keys() else None


def _signal_name(number: int) -> str:
    """``SIGKILL``; real-time signals have numbers only."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _trouble(folder: RunFolder, error: OSError | ValueError) -> str:
    """Why a process could not be started or followed, and what to do."""
    if not folder.path.is_dir():
        return f"its folder {folder.path} is gone: run it again to begin anew"
    return f"cannot be run: {error}; `splitfg resume {folder.path}` tries again"


def _advice(folder: RunFolder, code: int) -> str:
    """What to do about a process that ended without a word."""
    said = f"; see {folder.log_path}" if folder.log_path.exists() and folder.log_path.stat().st_size else ""
    if code != -signal.SIGKILL:
        return said
    how = "goes on from its last checkpoint" if folder.has_checkpoint else "begins anew, as nothing was saved yet"
    return f"{said}. It may have run out of memory; `splitfg resume {folder.path}` {how}"
