"""``ls`` and ``show``: what can be run, what has been, and what a preset says."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from splitfg_lab.commands._listing import listing_console, name_grid
from splitfg_lab.commands._options import DEFAULT_RESULTS, DEFAULT_RUNS, Json, Recorded, Runs, complete_targets
from splitfg_lab.commands._standing import Standing, standings
from splitfg_lab.commands._targets import find_presets
from splitfg_lab.experiments import EXPERIMENTS, Experiment, Preset
from splitfg_lab.experiments.spec import Cell, Paper
from splitfg_lab.runs.config import dataclass_members, field_types, format_annotation

_COLOURS = {"done": "green", "partly": "yellow", "not run": "dim"}


def ls(
    targets: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TARGET]...", help="Experiments or presets.", autocompletion=complete_targets),
    ] = None,
    runs: Runs = DEFAULT_RUNS,
    results: Recorded = DEFAULT_RESULTS,
    as_json: Json = False,
) -> None:
    """List what can be run, and what is already done."""
    presets = find_presets(targets or [e.name for e in EXPERIMENTS])
    found, problems = standings(presets, runs, results)
    if as_json:
        typer.echo(json.dumps([standing.as_json() for standing in found], indent=2))
    else:
        _print_listing(found)
    for problem in problems:
        typer.secho(f"left out: {problem.reason}", fg="red", err=True)


def show(
    target: Annotated[str, typer.Argument(help="An experiment or a preset.", autocompletion=complete_targets)],
    runs: Runs = DEFAULT_RUNS,
    results: Recorded = DEFAULT_RESULTS,
) -> None:
    """Show a preset: its fields, what the paper says, what is done; or an experiment's protocol."""
    presets = find_presets([target])
    if target in {e.name for e in EXPERIMENTS}:
        _print_protocol(presets[0][0])
        _print_listing(standings(presets, runs, results)[0])
        return
    for standing in standings(presets, runs, results)[0]:
        _print_preset(standing)


def _print_listing(found: Sequence[Standing]) -> None:
    console = listing_console()
    for experiment, group in groupby(found, key=lambda s: s.experiment):
        console.print(Text.assemble((experiment.name, "bold cyan"), "  ", experiment.title, "  "), end="")
        console.print(Text(experiment.source, "dim"))
        console.print(name_grid(_listing_row(standing) for standing in group))
    if not found:
        console.print("There are no experiments.")


def _listing_row(standing: Standing) -> tuple[str, Text, Text]:
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
    """The README beside the experiment's runner."""
    package = experiment.runner.partition(":")[0].rpartition(".")[0]
    spec = importlib.util.find_spec(package) if package else None
    places = [Path(place) / "README.md" for place in (spec.submodule_search_locations or [])] if spec else []
    return next((path for path in places if path.exists()), None)


def _print_preset(standing: Standing) -> None:
    console = listing_console()
    experiment, preset = standing.experiment, standing.preset
    console.print(Text.assemble((f"{experiment.name}/{preset.name}", "bold cyan"), "  ", preset.title))
    console.print(Text(f"{experiment.source}; seeds {', '.join(map(str, preset.seeds))}; {standing.summary()}", "dim"))
    fields = ((name, _as_typed(value), Text(kind, "dim")) for name, value, kind in _fields(preset.config))
    console.print(name_grid(fields, ("field", "value", "type")))
    for line in _paper_lines(experiment, preset):
        console.print(line)
    console.print(Text(f"splitfg run {experiment.name}/{preset.name} --set FIELD=VALUE", "dim"))


def _fields(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """Dotted name, value and type of every field; a nested dataclass is named by its class."""
    cls: type = type(config)
    for name, annotation in field_types(cls).items():
        value = getattr(config, name)
        nested = type(value).__name__ in dataclass_members(annotation)
        yield f"{prefix}{name}", type(value).__name__ if nested else value, format_annotation(annotation)
        if nested:
            yield from _fields(value, f"{prefix}{name}.")


def _as_typed(value: Any) -> str:
    """A value as ``--set`` takes it."""
    if isinstance(value, tuple):
        return ",".join(map(_as_typed, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _paper_lines(experiment: Experiment, preset: Preset) -> Iterator[str]:
    """What the paper prints for this preset."""
    for table in experiment.tables:
        for row in table.rows:
            for cell in row.cells:
                if isinstance(cell, Cell) and cell.preset == preset.name and cell.paper is not None:
                    over = "" if cell.over is None else f" over that of {cell.over}"
                    yield f"  paper: {cell.metric}{over} {_paper(cell.paper)}  ({table.title})"


def _paper(paper: Paper) -> str:
    return f"{paper.mean:g}" if paper.std is None else f"{paper.mean:g} ± {paper.std:g}"
