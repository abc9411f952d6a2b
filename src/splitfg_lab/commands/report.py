"""``report`` and ``results``: read the results beside the paper's, and record them in files that travel."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from splitfg_lab.commands._options import (
    DEFAULT_RESULTS,
    DEFAULT_RUNS,
    Recorded,
    Results,
    Runs,
    complete_runs,
    complete_targets,
)
from splitfg_lab.commands._targets import find_presets, find_runs
from splitfg_lab.commands.errors import EXIT_FAILED, UsageError
from splitfg_lab.runs.results import add_records, collect

results_app = typer.Typer(no_args_is_help=True, help="Record results in small files that can be tracked.")


def report(
    experiment: Annotated[
        str | None, typer.Argument(help="Print only this one.", autocompletion=complete_targets)
    ] = None,
    runs: Runs = DEFAULT_RUNS,
    results: Recorded = DEFAULT_RESULTS,
    out: Annotated[Path, typer.Option(help="The folder to write report.html and report.md into.")] = Path("report"),
) -> None:
    """Print every table beside the paper's, and write them as one HTML page and as Markdown."""
    from splitfg_lab.report import UnreadableWarning, build_report, print_report

    if experiment is not None:
        experiment = find_presets([experiment])[0][0].name
    print_report(runs, results, experiment)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnreadableWarning)  # what was printed ends with these files
        typer.echo(f"written: {build_report(runs, results, out)}")


@results_app.command()
def add(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN]...",
            help="Run folders, folders of them, or results files from another machine; all finished runs if none.",
            autocompletion=complete_runs,
        ),
    ] = None,
    runs: Runs = DEFAULT_RUNS,
    results: Results = DEFAULT_RESULTS,
) -> None:
    """Fold finished runs into results/EXPERIMENT.json."""
    files, named = _files_and_runs(names or [])
    folders = find_runs(runs, named) if named or not files else []
    for folder in folders:
        if not folder.finished:
            typer.secho(f"left out, not finished: {folder.path}", fg="yellow", err=True)
    finished = [folder for folder in folders if folder.finished]
    if not finished and not files:
        raise UsageError(f"there are no finished runs in {runs}")
    records, problems = collect(finished, files)
    for path in add_records(records, results):
        typer.echo(f"written: {path}")
    for problem in problems:
        typer.secho(f"left out: {problem.reason}", fg="red", err=True)
    if problems:
        raise typer.Exit(EXIT_FAILED)


def _files_and_runs(names: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Which names are results files, and which are to be looked for among the run folders.

    Raises:
        UsageError: Some name results files that are not there.
    """
    missing = [name for name in names if name.endswith(".json") and not Path(name).is_file()]
    if missing:
        raise UsageError("\n".join(f"there is no results file {name}" for name in missing))
    return [Path(name) for name in names if Path(name).is_file()], [n for n in names if not Path(n).is_file()]
