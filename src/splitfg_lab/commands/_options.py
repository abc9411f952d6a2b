"""Options and arguments that several verbs share, with their completion."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from splitfg_lab.commands.errors import UsageError
from splitfg_lab.commands.output import print_coloured

DEFAULT_RUNS = Path("runs")
DEFAULT_RESULTS = Path("results")


def complete_targets(incomplete: str) -> list[str]:
    """Complete names of experiments, presets, tables and figures."""
    from splitfg_lab.commands._targets import target_names

    return [name for name in target_names() if name.startswith(incomplete)]


def complete_runs(incomplete: str) -> list[str]:
    """Complete names of run folders."""
    from splitfg_lab.runs import find_folders

    return [folder.name for folder in find_folders(DEFAULT_RUNS) if folder.name.startswith(incomplete)]


def complete_data(incomplete: str) -> list[str]:
    """Complete names of data sets."""
    from splitfg_lab.data import names

    return [name for name in names() if name.startswith(incomplete)]


def check_device(name: str) -> str:
    """Validate the form of a device name; torch validates later whether the device exists."""
    if re.fullmatch(r"auto|(cpu|cuda|mps|xpu)(:\d+)?", name) is None:
        raise UsageError(f"--device {name}: expected auto, cpu, cuda or cuda:1")
    return name


def check_results(folder: Path) -> Path:
    """Validate that a folder of results exists; the default folder may be missing."""
    if folder != DEFAULT_RESULTS and not folder.is_dir():
        raise UsageError(f"--results {folder}: there is no such folder")
    return folder


def note_missing(results: Path) -> None:
    """Print that there are no recorded results if their folder is missing."""
    if not results.is_dir():
        line = (
            f"There is no folder {results} here: only own runs are shown. Pass --results FOLDER to show recorded ones."
        )
        print_coloured(line, "yellow", err=True)


Runs = Annotated[Path, typer.Option("--runs", help="Folder of the run folders.", envvar="SPLITFG_RUNS")]
Results = Annotated[Path, typer.Option("--results", help="Folder of the recorded results.")]
Recorded = Annotated[Path, typer.Option("--results", help="Folder of the recorded results.", callback=check_results)]
Jobs = Annotated[int, typer.Option("--jobs", "-j", min=1, help="Number of runs at a time, each in its own process.")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:1.", callback=check_device)]
Ranks = Annotated[
    int, typer.Option("--ranks", min=1, help="Processes that share each run, started by torchrun; see --restarts.")
]
Restarts = Annotated[
    int, typer.Option("--restarts", min=0, help="With --ranks: restarts from the last checkpoint if one is lost.")
]
RankTimeout = Annotated[
    float, typer.Option("--rank-timeout", min=1, help="With --ranks: seconds after which a hung process is lost.")
]
Share = Annotated[
    bool,
    typer.Option(
        "--share", help="Divide the runs with other hosts that run the same command on the same --runs folder."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
TensorBoard = Annotated[bool, typer.Option("--tensorboard", help="Also write TensorBoard logs to the run folder.")]
