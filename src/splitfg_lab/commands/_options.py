"""Options and arguments that several verbs share, with their completion."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from splitfg_lab.commands.errors import UsageError

DEFAULT_RUNS = Path("runs")
DEFAULT_RESULTS = Path("results")


def complete_targets(incomplete: str) -> list[str]:
    """Names of experiments, presets, tables and figures that begin as typed."""
    from splitfg_lab.commands._targets import target_names

    return [name for name in target_names() if name.startswith(incomplete)]


def complete_runs(incomplete: str) -> list[str]:
    """Names of run folders that begin as typed."""
    from splitfg_lab.runs import find_folders

    return [folder.name for folder in find_folders(DEFAULT_RUNS) if folder.name.startswith(incomplete)]


def complete_data(incomplete: str) -> list[str]:
    """Names of data sets that begin as typed."""
    from splitfg_lab.data import names

    return [name for name in names() if name.startswith(incomplete)]


def check_device(name: str) -> str:
    """A device name as it is, if torch could know it; whether the device is there is for torch to say."""
    if re.fullmatch(r"auto|(cpu|cuda|mps|xpu)(:\d+)?", name) is None:
        raise UsageError(f"--device {name}: expected auto, cpu, cuda or cuda:1")
    return name


def check_results(folder: Path) -> Path:
    """A folder of results as it is; the usual one may not be there yet."""
    if folder != DEFAULT_RESULTS and not folder.is_dir():
        raise UsageError(f"--results {folder}: there is no such folder")
    return folder


Runs = Annotated[Path, typer.Option("--runs", help="The folder of run folders.", envvar="SPLITFG_RUNS")]
Results = Annotated[Path, typer.Option("--results", help="The folder of recorded results files.")]
Recorded = Annotated[
    Path, typer.Option("--results", help="The folder of recorded results files.", callback=check_results)
]
Jobs = Annotated[int, typer.Option("--jobs", "-j", min=1, help="Runs at a time, each in a process of its own.")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:1.", callback=check_device)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
TensorBoard = Annotated[bool, typer.Option("--tensorboard", help="Also log for TensorBoard, in the run folder.")]
