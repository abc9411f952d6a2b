"""Make runs: prepare their folders, run them, and summarise how they ended."""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from splitfg_lab.commands._listing import listing_console
from splitfg_lab.commands._targets import Plan
from splitfg_lab.runs import RunError, RunFolder

if TYPE_CHECKING:
    from splitfg_lab.runs.jobs import Outcome

_NAMED = 5
"""Runs that a summary names before it counts the rest."""


@dataclass(frozen=True)
class How:
    """Options of ``run`` and ``resume``."""

    jobs: int = 1
    device: str = "auto"
    tensorboard: bool = False
    as_json: bool = False


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
    waiting, unusable = _claim(folders)
    command = [sys.executable, "-m", "splitfg_lab.commands.worker"]
    options = ["--device", how.device, *(["--tensorboard"] if how.tensorboard else [])]
    queue = [Job(folder, (*command, str(folder.path), *options)) for folder in waiting]
    with choose_view(console, total=len(queue), as_json=how.as_json) as view:
        for outcome in refused + unusable:
            view.show({"event": "failed", "run": outcome.run, "message": outcome.message})
        outcomes = refused + unusable + run_jobs(queue, at_once=how.jobs, view=view)
    finished = len(folders) - len(waiting) - len(unusable)
    _summarise(console, outcomes, finished_before=finished, as_json=how.as_json)
    return outcomes


def discard_refused(new: Sequence[RunFolder], outcomes: Sequence[Outcome]) -> None:
    """Delete the new folders of runs that failed before their first step."""
    refused = {outcome.run for outcome in outcomes if outcome.refused}
    for folder in new:
        if folder.name in refused:
            with suppress(RunError):  # another process runs in it by now
                folder.discard()


def _claim(folders: Sequence[RunFolder]) -> tuple[list[RunFolder], list[Outcome]]:
    """Separate folders that can run from those that are in use or damaged, before any process starts."""
    from splitfg_lab.runs.jobs import Outcome

    waiting: list[RunFolder] = []
    unusable: list[Outcome] = []
    for folder in folders:
        try:
            if folder.finished:
                folder.require_result()
                continue
            with folder.locked():
                waiting.append(folder)
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
    console.print(", ".join(parts) or "nothing to run", style="bold")


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
