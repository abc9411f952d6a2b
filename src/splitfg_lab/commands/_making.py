"""Make runs: prepare their folders, run them, and summarise how they ended."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from splitfg_lab.commands._listing import listing_console
from splitfg_lab.commands._targets import Plan
from splitfg_lab.runs import RunError, RunFolder
from splitfg_lab.runs.lease import BusyError

if TYPE_CHECKING:
    from splitfg_lab.runs.jobs import Job, Outcome

_POLL_S = 5.0
"""Seconds between two looks at runs of other hosts."""

_NAMED = 5
"""Runs that a summary names before it counts the rest."""


@dataclass(frozen=True)
class How:
    """Options of ``run`` and ``resume``."""

    jobs: int = 1
    device: str = "auto"
    tensorboard: bool = False
    as_json: bool = False
    ranks: int = 1
    restarts: int = 3
    timeout: float = 300.0
    share: bool = False

    def command(self, folder: RunFolder) -> tuple[str, ...]:
        """Return the command that runs a folder: one process, or several that torchrun starts and restarts."""
        options = ["--device", self.device, *(["--tensorboard"] if self.tensorboard else [])]
        worker = ("-m", "splitfg_lab.commands.worker", str(folder.path), *options)
        if self.ranks == 1:
            return (sys.executable, *worker)
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.ranks))
        tries = ("--max-restarts", str(self.restarts))
        return (sys.executable, *torchrun, *tries, *worker, "--timeout", str(self.timeout), "--no-restart")


@dataclass(frozen=True)
class Prepared:
    """Folders that can run, the new ones among them, and the failures of folders that hold another run."""

    folders: list[RunFolder] = field(default_factory=list)
    new: list[RunFolder] = field(default_factory=list)
    refused: list[Outcome] = field(default_factory=list)


def prepare(plans: Sequence[Plan], root: Path) -> Prepared:
    """Write the configs of plans into their folders."""
    from splitfg_lab.runs.jobs import Outcome

    prepared = Prepared()
    for plan in plans:
        folder = plan.folder(root)
        is_new = not folder.path.exists()
        try:
            plan.prepare(folder)
        except RunError as error:
            prepared.refused.append(Outcome(folder.name, "failed", str(error)))
            continue
        prepared.folders.append(folder)
        if is_new:
            prepared.new.append(folder)
    return prepared


def make(folders: Sequence[RunFolder], refused: list[Outcome], how: How) -> list[Outcome]:
    """Run the folders that are not finished, print a summary, and return all outcomes."""
    from splitfg_lab.runs.bars import choose_view
    from splitfg_lab.runs.jobs import Job, run_jobs

    console = listing_console()
    waiting, unusable = _claim(folders, share=how.share)
    queue = [Job(folder, how.command(folder)) for folder in waiting]
    with choose_view(console, total=len(queue), as_json=how.as_json) as view:
        for outcome in refused + unusable:
            view.show({"event": "failed", "run": outcome.run, "message": outcome.message})
        made = run_jobs(queue, at_once=how.jobs, view=view)
        while how.share and not _stopped(made) and (left := _unfinished(queue, made)):
            time.sleep(_POLL_S)
            free = [job for job in left if _is_free(job.folder)]
            again = {o.run: o for o in run_jobs(free, at_once=how.jobs, view=view)}
            made = [again.get(outcome.run, outcome) for outcome in made]
    outcomes = refused + unusable + [_judged(outcome, queue, how) for outcome in made]
    finished = len(folders) - len(waiting) - len(unusable)
    _summarise(console, outcomes, finished_before=finished, as_json=how.as_json)
    return outcomes


def _is_free(folder: RunFolder) -> bool:
    try:
        folder.require_free()
    except BusyError:
        return False
    return True


def _stopped(outcomes: Sequence[Outcome]) -> bool:
    return any(outcome.status in ("stopped", "waiting") for outcome in outcomes)


def _unfinished(queue: Sequence[Job], outcomes: Sequence[Outcome]) -> list[Job]:
    """Return the jobs that another host had, and has not finished; their hosts may be dead."""
    elsewhere = {outcome.run for outcome in outcomes if outcome.status == "elsewhere"}
    return [job for job in queue if job.folder.name in elsewhere and not job.folder.finished]


def _judged(outcome: Outcome, queue: Sequence[Job], how: How) -> Outcome:
    """Count a run that another host finished as such; without sharing, one that is in use has failed."""
    if outcome.status != "elsewhere":
        return outcome
    folder = next(job.folder for job in queue if job.folder.name == outcome.run)
    if how.share and folder.finished:
        report = folder.report()
        return replace(outcome, status=report.status, message=report.message, metrics=report.metrics)
    return replace(outcome, status="failed")


def discard_refused(new: Sequence[RunFolder], outcomes: Sequence[Outcome]) -> None:
    """Delete the new folders of runs that failed before their first step."""
    refused = {outcome.run for outcome in outcomes if outcome.refused}
    for folder in new:
        if folder.name in refused:
            with suppress(RunError):  # another process runs in it by now
                folder.discard()


def _claim(folders: Sequence[RunFolder], *, share: bool) -> tuple[list[RunFolder], list[Outcome]]:
    """Separate folders that can run from those that are in use or damaged, before any process starts."""
    from splitfg_lab.runs.jobs import Outcome

    waiting: list[RunFolder] = []
    unusable: list[Outcome] = []
    for folder in folders:
        try:
            if folder.finished:
                folder.require_result()
                continue
            folder.require_free()
            waiting.append(folder)
        except BusyError as error:
            if share:
                waiting.append(folder)
            else:
                unusable.append(Outcome(folder.name, "failed", str(error)))
        except RunError as error:
            unusable.append(Outcome(folder.name, "failed", str(error)))
    return waiting, unusable


def _summarise(console: Console, outcomes: Sequence[Outcome], *, finished_before: int, as_json: bool) -> None:
    counts = Counter(outcome.status for outcome in outcomes) | Counter({"skipped": finished_before})
    if as_json:
        typer.echo(json.dumps({"event": "summary", **counts}))
        return
    for line in _shared_failures(outcomes):
        console.print(line, style="red", markup=False)
    words = {"skipped": "finished before", "waiting": "not started"}
    parts = [f"{count} {words.get(status, status)}" for status, count in counts.items() if count]
    console.print(", ".join(parts) or "nothing to resume: there are no run folders", style="bold")


def _shared_failures(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Name the runs whose failure message was shown for another run."""
    runs: dict[str, list[str]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.status == "failed":
            runs[outcome.message].append(outcome.run)
    for first, *others in runs.values():
        if others:
            named = ", ".join(others[:_NAMED])
            rest = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
            yield f"failed like {first}: {named}{rest}"
