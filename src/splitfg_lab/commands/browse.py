"""``ls`` and ``show``: the experiments, the state of their presets, and the fields of a preset."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from splitfg_lab.commands._listing import listing_console, print_rows
from splitfg_lab.commands._options import (
    DEFAULT_RESULTS,
    DEFAULT_RUNS,
    Json,
    Recorded,
    Runs,
    complete_targets,
    note_missing,
)
from splitfg_lab.commands._standing import Standing, standings
from splitfg_lab.commands._targets import find_presets
from splitfg_lab.commands.output import print_coloured
from splitfg_lab.experiments import EXPERIMENTS, Experiment, Preset
from splitfg_lab.experiments.spec import Cell, Paper

_COLOURS = {"done": "green", "partly": "yellow", "not run": "dim"}


def ls(
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TARGET",
            help="An experiment, to list its presets; or presets, tables, patterns with *.",
            autocompletion=complete_targets,
        ),
    ] = None,
    runs: Runs = DEFAULT_RUNS,
    results: Recorded = DEFAULT_RESULTS,
    as_json: Json = False,
) -> None:
    """List the experiments; with a target, list its presets and their runs.

    "recorded" counts finished runs in the results folder, "here" counts finished runs in your run folders.
    """
    presets = find_presets(targets or [e.name for e in EXPERIMENTS])
    found, problems = standings(presets, runs, results)
    if as_json:
        typer.echo(json.dumps([standing.as_json() for standing in found], indent=2))
    elif targets:
        _print_presets(found)
    else:
        _print_overview(found)
    for problem in problems:
        print_coloured(f"skipped: {problem.reason}", "red", err=True)
    note_missing(results)


def show(
    target: Annotated[str, typer.Argument(help="An experiment or a preset.", autocompletion=complete_targets)],
    runs: Runs = DEFAULT_RUNS,
    results: Recorded = DEFAULT_RESULTS,
) -> None:
    """Explain the fields of a preset and show the paper's numbers; or show the protocol of an experiment."""
    presets = find_presets([target])
    if target in {e.name for e in EXPERIMENTS}:
        _print_protocol(presets[0][0])
        _print_presets(standings(presets, runs, results)[0])
    else:
        for standing in standings(presets, runs, results)[0]:
            _print_preset(standing)
    note_missing(results)


def _print_overview(found: Sequence[Standing]) -> None:
    """Print a line per experiment."""
    console = listing_console()
    groups = [(experiment, list(group)) for experiment, group in groupby(found, key=lambda s: s.experiment)]
    rows = [_overview_row(experiment, group) for experiment, group in groups]
    print_rows(console, rows, ("experiment", "presets", "recorded", "here", ""))
    console.print(Text("recorded: presets in the folder results; here: presets in the folder runs.", "dim"))
    console.print(Text("`splitfg ls EXPERIMENT` lists its presets, `splitfg ls 'EXPERIMENT/a*'` some,", "dim"))
    console.print(Text("`splitfg show EXPERIMENT` prints its protocol.", "dim"))


def _overview_row(experiment: Experiment, group: Sequence[Standing]) -> tuple[str | Text, ...]:
    recorded, local = (sum(bool(getattr(s, where)) for s in group) for where in ("recorded", "local"))
    unfinished = sum(s.unfinished for s in group)
    here = f"{local or ''}{f' +{unfinished} unfinished' if unfinished else ''}" or "-"
    colour = "green" if recorded == len(group) else "yellow"
    return (
        Text(experiment.name, "bold cyan"),
        str(len(group)),
        Text(str(recorded or "-"), colour if recorded else "dim"),
        Text(here.strip(), "" if local or unfinished else "dim"),
        Text(experiment.title, "dim"),
    )


def _print_presets(found: Sequence[Standing]) -> None:
    console = listing_console()
    for experiment, group in groupby(found, key=lambda s: s.experiment):
        name = (experiment.name, "bold cyan")
        console.print(Text.assemble(name, "  ", experiment.title, "  ", (experiment.source, "dim")))
        print_rows(console, [_preset_row(standing) for standing in group])


def _preset_row(standing: Standing) -> tuple[str, Text, Text]:
    state = Text(standing.summary(), _COLOURS[standing.state])
    return standing.preset.name, Text(standing.preset.title, "dim"), state


def _print_protocol(experiment: Experiment) -> None:
    from rich.markdown import Markdown

    console = Console()
    readme = _readme(experiment)
    if readme is not None:
        console.print(Markdown(readme.read_text(encoding="utf-8")))
        console.print()


def _readme(experiment: Experiment) -> Path | None:
    """Return the README next to the experiment's runner."""
    package = experiment.runner.partition(":")[0].rpartition(".")[0]
    spec = importlib.util.find_spec(package) if package else None
    places = [Path(place) / "README.md" for place in (spec.submodule_search_locations or [])] if spec else []
    return next((path for path in places if path.exists()), None)


def _print_preset(standing: Standing) -> None:
    from splitfg_lab.runs.fields import explain

    console = listing_console()
    experiment, preset = standing.experiment, standing.preset
    console.print(Text.assemble((f"{experiment.name}/{preset.name}", "bold cyan"), "  ", preset.title))
    console.print(Text(f"{experiment.source}; seeds {', '.join(map(str, preset.seeds))}; {standing.summary()}", "dim"))
    if not experiment.resumes(preset):
        console.print(Text("Writes no checkpoints: an interrupted run starts over.", "yellow"))
    for field in explain(preset.config):
        console.print(Text.assemble((field.name, "bold"), " = ", _as_typed(field.value)))
        words = Text.assemble((field.type, "italic"), f". {field.text}" if field.text else "", style="dim")
        console.print(Padding(words, (0, 0, 0, 4), expand=False))
    for line in _paper_lines(experiment, preset):
        console.print(line)
    console.print(Text(f"splitfg run {experiment.name}/{preset.name} --set FIELD=VALUE", "dim"))


def _as_typed(value: Any) -> str:
    """Write a value as ``--set`` takes it; in a terminal, lists have spaces at which they wrap."""
    if isinstance(value, tuple):
        return (", " if sys.stdout.isatty() else ",").join(map(_as_typed, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _paper_lines(experiment: Experiment, preset: Preset) -> Iterator[str]:
    """Yield the paper's numbers for a preset, each with the first table that has it."""
    found: dict[str, str] = {}
    for table in experiment.tables:
        for row in table.rows:
            for cell in row.cells:
                if isinstance(cell, Cell) and cell.preset == preset.name and cell.paper is not None:
                    over = "" if cell.over is None else f" over that of {cell.over}"
                    found.setdefault(f"{cell.metric}{over} {_paper(cell.paper)}", table.title)
    for title, numbers in groupby(found, key=lambda number: found[number]):
        yield f"paper: {', '.join(numbers)}  ({title})"


def _paper(paper: Paper) -> str:
    return f"{paper.mean:g}" if paper.std is None else f"{paper.mean:g} ± {paper.std:g}"
