"""``report`` and ``results``: compare results with the paper's, and record them."""

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
    note_missing,
)
from splitfg_lab.commands._targets import find_presets, find_runs
from splitfg_lab.commands.errors import EXIT_FAILED, UsageError
from splitfg_lab.commands.output import print_coloured
from splitfg_lab.runs.results import add_records, collect

results_app = typer.Typer(no_args_is_help=True, help="Record results in small files under version control.")


def report(
    experiment: Annotated[
        str | None,
        typer.Argument(help="Print only this experiment; the files always hold all.", autocompletion=complete_targets),
    ] = None,
    runs: Runs = DEFAULT_RUNS,
    results: Recorded = DEFAULT_RESULTS,
    out: Annotated[Path, typer.Option(help="Folder for report.html and report.md.")] = Path("report"),
) -> None:
    """Print every table next to the paper's numbers, and write report.html and report.md."""
    from splitfg_lab.report import UnreadableWarning, build_report, print_report

    if experiment is not None:
        experiment = find_presets([experiment])[0][0].name
    if not any(next(folder.rglob("*.json"), None) for folder in (runs, results)):
        # an empty report would replace an earlier one
        raise UsageError(f"no runs in {runs} and no results in {results}: pass --runs FOLDER or --results FOLDER")
    print_report(runs, results, experiment)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnreadableWarning)  # print_report lists these files
        typer.echo(f"written: {build_report(runs, results, out)}")
    note_missing(results)


@results_app.command()
def add(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN",
            help="Run folders, parents of them, or results files of another machine; by default all finished runs.",
            autocompletion=complete_runs,
        ),
    ] = None,
    runs: Runs = DEFAULT_RUNS,
    results: Results = DEFAULT_RESULTS,
) -> None:
    """Add finished runs to results/EXPERIMENT.json."""
    files, named = _files_and_runs(names or [])
    folders = find_runs(runs, named) if named or not files else []
    for folder in folders:
        if not folder.finished:
            print_coloured(f"skipped, not finished: {folder.path}", "yellow", err=True)
    finished = [folder for folder in folders if folder.finished]
    if not finished and not files:
        raise UsageError(f"there are no finished runs in {runs}")
    records, problems = collect(finished, files)
    for path in add_records(records, results):
        typer.echo(f"written: {path}")
    for problem in problems:
        print_coloured(f"skipped: {problem.reason}", "red", err=True)
    if problems:
        raise typer.Exit(EXIT_FAILED)


def _files_and_runs(names: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Separate names of results files from names of run folders.

    Raises:
        UsageError: A results file does not exist.
    """
    missing = [name for name in names if name.endswith(".json") and not Path(name).is_file()]
    if missing:
        raise UsageError("\n".join(f"there is no results file {name}" for name in missing))
    return [Path(name) for name in names if Path(name).is_file()], [n for n in names if not Path(n).is_file()]
