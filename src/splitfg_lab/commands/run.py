"""``run``, ``resume`` and ``demo``: make runs, several at a time, and resume interrupted ones."""

from __future__ import annotations

import shlex
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from splitfg_lab.commands._listing import listing_console, print_rows
from splitfg_lab.commands._making import How, discard_refused, make, prepare
from splitfg_lab.commands._options import (
    DEFAULT_RESULTS,
    DEFAULT_RUNS,
    Device,
    Jobs,
    Json,
    Ranks,
    RankTimeout,
    Restarts,
    Results,
    Runs,
    Share,
    TensorBoard,
    complete_runs,
    complete_targets,
)
from splitfg_lab.commands._ranked import run_here, under_torchrun
from splitfg_lab.commands._targets import Plan, find_runs, make_plans, parse_seeds
from splitfg_lab.commands._times import recorded_seconds, time_sentence
from splitfg_lab.commands.errors import EXIT_FAILED, EXIT_OK, EXIT_STOPPED
from splitfg_lab.runs.durations import format_duration

if TYPE_CHECKING:
    from splitfg_lab.runs.jobs import Outcome

_STARTS_OVER = "writes no checkpoints: if interrupted, it starts over"


def run(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="TARGET",
            help="experiment, experiment/preset, experiment/table (by its key), or a pattern with *.",
            autocompletion=complete_targets,
        ),
    ],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", "-s", metavar="FIELD=VALUE", help="Override a config field; `splitfg show` lists them."),
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds, as 0,1,2 or 0-4; by default each preset's own.")] = None,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Only test: a few steps and a small evaluation; records nothing.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only list the runs, their state and expected time; write nothing.")
    ] = False,
    jobs: Jobs = 1,
    ranks: Ranks = 1,
    restarts: Restarts = 3,
    rank_timeout: RankTimeout = 300.0,
    share: Share = False,
    device: Device = "auto",
    runs: Runs = DEFAULT_RUNS,
    results: Results = DEFAULT_RESULTS,
    tensorboard: TensorBoard = False,
    as_json: Json = False,
) -> None:
    """Run presets; skip finished runs and resume interrupted ones."""
    plans = make_plans(targets, settings or [], None if seeds is None else parse_seeds(seeds), smoke=smoke)
    how = How(jobs, device, tensorboard, as_json, ranks, restarts, rank_timeout, share)
    if under_torchrun():
        raise typer.Exit(run_here(plans, runs, how))
    if dry_run:
        _print_plans(plans, runs, results)
    elif smoke:
        _smoke(plans, how)
    else:
        if not as_json:
            _announce(plans, runs, results)
        prepared = prepare(plans, runs)
        outcomes = make(prepared.folders, prepared.refused, how)
        discard_refused(prepared.new, outcomes)
        _finish(outcomes, _resume_command(runs, how), "" if as_json else _report_command(plans, runs))


def resume(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN", help="Run folders; by default all unfinished ones.", autocompletion=complete_runs
        ),
    ] = None,
    jobs: Jobs = 1,
    ranks: Ranks = 1,
    restarts: Restarts = 3,
    rank_timeout: RankTimeout = 300.0,
    share: Share = False,
    device: Device = "auto",
    runs: Runs = DEFAULT_RUNS,
    tensorboard: TensorBoard = False,
    as_json: Json = False,
) -> None:
    """Resume interrupted runs from their checkpoints."""
    how = How(jobs, device, tensorboard, as_json, ranks, restarts, rank_timeout, share)
    _finish(make(find_runs(runs, names or []), [], how), _resume_command(runs, how))


def demo(device: Device = "auto", runs: Runs = DEFAULT_RUNS, results: Results = DEFAULT_RESULTS) -> None:
    """Train on digits with four methods (under a minute on a CPU), print a table and draw learning curves."""
    from splitfg_lab.report import print_report, write_figures

    how = How(device=device)
    prepared = prepare(make_plans(["demo"], [], None), runs)
    outcomes = make(prepared.folders, prepared.refused, how)
    discard_refused(prepared.new, outcomes)
    print_report(runs, results, "demo")
    for path in write_figures(runs, results, runs / "demo", "demo"):
        typer.echo(f"drawn: {path}")
    _finish(outcomes, _resume_command(runs, how))


def _smoke(plans: Sequence[Plan], how: How) -> None:
    """Run plans in a temporary folder, which stays only if one of them fails."""
    root = Path(tempfile.mkdtemp(prefix="splitfg-smoke-"))
    outcomes: Sequence[Outcome] = ()
    try:
        prepared = prepare(plans, root)
        outcomes = make(prepared.folders, prepared.refused, how)
    finally:
        if any(outcome.status == "failed" and not outcome.refused for outcome in outcomes):
            typer.echo(f"smoke test: logs are in {root}", err=True)
        else:
            shutil.rmtree(root, ignore_errors=True)
    if not how.as_json:
        typer.echo("smoke test: nothing was recorded")
    _finish(outcomes, "")


def _print_plans(plans: Sequence[Plan], runs: Path, results: Path) -> None:
    """Print what ``run`` would do."""
    console = listing_console()
    times = recorded_seconds(plans, results)
    rows = []
    for plan, time in zip(plans, times, strict=True):
        known = "" if time is None else f"recorded: {format_duration(time[0])} on {time[1]}"
        notes = [known, "" if plan.experiment.resumes(plan.preset) else _STARTS_OVER]
        rows.append((plan.folder(runs).name, plan.state(runs), Text("; ".join(filter(None, notes)), "dim")))
    print_rows(console, rows)
    sentence = time_sentence(times)
    if sentence:
        console.print(sentence)
    console.print(f"{len(plans)} run{'s' * (len(plans) != 1)}; this was a dry run, nothing was written", style="bold")


def _announce(plans: Sequence[Plan], runs: Path, results: Path) -> None:
    """Print the expected time of long runs, and which of them cannot resume."""
    open_plans = [plan for plan in plans if not plan.folder(runs).finished]
    console = listing_console(stderr=True)
    sentence = time_sentence(recorded_seconds(open_plans, results))
    if sentence:
        console.print(sentence, style="dim", markup=False)
    lasting = dict.fromkeys(
        f"{plan.experiment.name}/{plan.preset.name}" for plan in open_plans if not plan.experiment.resumes(plan.preset)
    )
    if lasting:
        named = ", ".join(list(lasting)[:3]) + (f" and {len(lasting) - 3} more" if len(lasting) > 3 else "")
        console.print(f"{named}: {_STARTS_OVER}", style="dim", markup=False)


def _resume_command(root: Path, how: How) -> str:
    """Return the command that resumes interrupted runs with the same options."""
    options = [
        *(["--jobs", str(how.jobs)] if how.jobs > 1 else []),
        *(["--ranks", str(how.ranks)] if how.ranks > 1 else []),
        *(["--share"] if how.share else []),
        *(["--device", how.device] if how.device != "auto" else []),
        *(["--tensorboard"] if how.tensorboard else []),
        *(["--runs", str(root)] if root != DEFAULT_RUNS else []),
    ]
    return shlex.join(["splitfg", "resume", *options])


def _report_command(plans: Sequence[Plan], root: Path) -> str:
    """Return the command that prints the results of these runs."""
    names = {plan.experiment.name for plan in plans}
    options = ["--runs", str(root)] if root != DEFAULT_RUNS else []
    return shlex.join(["splitfg", "report", *(names if len(names) == 1 else ()), *options])


def _finish(outcomes: Sequence[Outcome], resume_command: str, report_command: str = "") -> None:
    """Exit with the code of the outcomes; print how to resume interrupted runs, or how to see the results."""
    statuses = {outcome.status for outcome in outcomes}
    if statuses & {"stopped", "waiting"}:
        if resume_command:
            typer.echo(f"resume with: {resume_command}", err=True)
        raise typer.Exit(EXIT_STOPPED)
    if report_command and "failed" not in statuses:
        typer.echo(f"see the results with: {report_command}", err=True)
    raise typer.Exit(EXIT_FAILED if statuses & {"failed", "diverged"} else EXIT_OK)
