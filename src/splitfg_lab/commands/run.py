"""``run``, ``resume`` and ``demo``: make runs, several at a time, and go on with those that were interrupted."""

from __future__ import annotations

import json
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from splitfg_lab.commands._options import (
    DEFAULT_RESULTS,
    DEFAULT_RUNS,
    Device,
    Jobs,
    Json,
    Results,
    Runs,
    TensorBoard,
    complete_runs,
    complete_targets,
)
from splitfg_lab.commands._targets import Plan, find_runs, make_plans, parse_seeds
from splitfg_lab.commands.errors import EXIT_FAILED, EXIT_OK, EXIT_STOPPED
from splitfg_lab.runs import RunError, RunFolder

if TYPE_CHECKING:
    from splitfg_lab.runs.jobs import Outcome


def run(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="TARGET...",
            help="experiment, experiment/preset, experiment/table (by its key), or a pattern with *.",
            autocompletion=complete_targets,
        ),
    ],
    settings: Annotated[
        list[str] | None, typer.Option("--set", "-s", metavar="FIELD=VALUE", help="Override a field of the config.")
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds, as 0,1,2 or 0-4; each preset's own if not given.")] = None,
    jobs: Jobs = 1,
    device: Device = "auto",
    runs: Runs = DEFAULT_RUNS,
    tensorboard: TensorBoard = False,
    as_json: Json = False,
) -> None:
    """Run presets, skipping what is finished and going on with what was interrupted."""
    plans = make_plans(targets, settings or [], None if seeds is None else parse_seeds(seeds))
    prepared = _prepare(plans, runs)
    outcomes = _make(prepared.folders, prepared.refused, jobs, device, tensorboard=tensorboard, as_json=as_json)
    _discard_refused(prepared.new, outcomes)
    _finish(outcomes, _going_on(runs, jobs, device, tensorboard=tensorboard))


def resume(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN]...", help="Run folders; all unfinished ones if none.", autocompletion=complete_runs
        ),
    ] = None,
    jobs: Jobs = 1,
    device: Device = "auto",
    runs: Runs = DEFAULT_RUNS,
    tensorboard: TensorBoard = False,
    as_json: Json = False,
) -> None:
    """Go on with runs that were interrupted."""
    folders = find_runs(runs, names or [])
    outcomes = _make(folders, [], jobs, device, tensorboard=tensorboard, as_json=as_json)
    _finish(outcomes, _going_on(runs, jobs, device, tensorboard=tensorboard))


def demo(device: Device = "auto", runs: Runs = DEFAULT_RUNS, results: Results = DEFAULT_RESULTS) -> None:
    """Run the demo, less than a minute on a CPU, print its table and draw its curves."""
    from splitfg_lab.report import print_report, write_figures

    prepared = _prepare(make_plans(["demo"], [], None), runs)
    outcomes = _make(prepared.folders, prepared.refused, 1, device, tensorboard=False, as_json=False)
    _discard_refused(prepared.new, outcomes)
    print_report(runs, results, "demo")
    for path in write_figures(runs, results, runs / "demo", "demo"):
        typer.echo(f"drawn: {path}")
    _finish(outcomes, _going_on(runs, 1, device, tensorboard=False))


@dataclass(frozen=True)
class _Prepared:
    """Folders that can be run, those among them that were not there before, and folders that hold something else."""

    folders: list[RunFolder] = field(default_factory=list)
    new: list[RunFolder] = field(default_factory=list)
    refused: list[Outcome] = field(default_factory=list)


def _prepare(plans: Sequence[Plan], root: Path) -> _Prepared:
    """Write the configs."""
    from splitfg_lab.runs.jobs import Outcome

    prepared = _Prepared()
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


def _discard_refused(new: Sequence[RunFolder], outcomes: Sequence[Outcome]) -> None:
    """Leave no folder behind for runs that were refused before their first step: there is nothing to go on with."""
    refused = {outcome.run for outcome in outcomes if outcome.refused}
    for folder in new:
        if folder.name in refused:
            with suppress(RunError):  # somebody else runs in it by now
                folder.discard()


def _claim(folders: Sequence[RunFolder]) -> tuple[list[RunFolder], list[Outcome]]:
    """The folders that wait to be run, and those that are busy or damaged; said before anything heavy is started."""
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


def _make(
    folders: Sequence[RunFolder],
    refused: list[Outcome],
    at_once: int,
    device: str,
    *,
    tensorboard: bool,
    as_json: bool,
) -> list[Outcome]:
    """Run what is not finished, and say how everything ended."""
    from splitfg_lab.runs.bars import choose_view
    from splitfg_lab.runs.jobs import Job, run_jobs

    console = Console(highlight=False, soft_wrap=True)
    waiting, unusable = _claim(folders)
    command = [sys.executable, "-m", "splitfg_lab.commands.worker"]
    options = ["--device", device, *(["--tensorboard"] if tensorboard else [])]
    queue = [Job(folder, (*command, str(folder.path), *options)) for folder in waiting]
    with choose_view(console, total=len(queue), as_json=as_json) as view:
        for outcome in refused + unusable:
            view.show({"event": "failed", "run": outcome.run, "message": outcome.message})
        outcomes = refused + unusable + run_jobs(queue, at_once=at_once, view=view)
    _summarise(console, outcomes, skipped=len(folders) - len(waiting) - len(unusable), as_json=as_json)
    return outcomes


def _summarise(console: Console, outcomes: Sequence[Outcome], *, skipped: int, as_json: bool) -> None:
    counts = Counter(outcome.status for outcome in outcomes) | Counter({"skipped": skipped})
    if as_json:
        typer.echo(json.dumps({"event": "summary", **counts}))
        return
    words = {"skipped": "finished before", "waiting": "not started"}
    parts = [f"{count} {words.get(status, status)}" for status, count in counts.items() if count]
    console.print(", ".join(parts) or "nothing to run", style="bold")


def _going_on(root: Path, jobs: int, device: str, *, tensorboard: bool) -> str:
    """The command that goes on with what was interrupted, as it was begun: with several jobs, each has one thread."""
    options = [
        *(["--jobs", str(jobs)] if jobs > 1 else []),
        *(["--device", device] if device != "auto" else []),
        *(["--tensorboard"] if tensorboard else []),
        *(["--runs", str(root)] if root != DEFAULT_RUNS else []),
    ]
    return shlex.join(["splitfg", "resume", *options])


def _finish(outcomes: Sequence[Outcome], going_on: str) -> None:
    """Exit with what the outcomes add up to, saying how to go on if they were interrupted."""
    statuses = {outcome.status for outcome in outcomes}
    if statuses & {"stopped", "waiting"}:
        typer.echo(f"go on with: {going_on}", err=True)
        raise typer.Exit(EXIT_STOPPED)
    raise typer.Exit(EXIT_FAILED if statuses & {"failed", "diverged"} else EXIT_OK)
