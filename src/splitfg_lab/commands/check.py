"""``doctor`` and ``diagnose``: check this machine, and measure the methods on your model."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from splitfg_lab.commands._options import Device
from splitfg_lab.commands.errors import EXIT_FAILED, UsageError
from splitfg_lab.runs.environment import describe_device, resolve_device, source_revision, versions

_EXPECTED = (
    "expected a function without arguments that returns (split, x, y): a Split, as splitfg.split(model) makes it, and"
    " inputs and targets of one batch"
)

if TYPE_CHECKING:
    from splitfg import Split
    from splitfg.types import Inputs, Target
    from splitfg_lab.commands._features import Feature


def doctor(device: Device = "auto") -> None:
    """Check versions, device, forward-mode features and data."""
    console = Console(highlight=False)
    revision = source_revision()
    source = "installed" if revision is None else f"git {revision.commit[:12]}{', changed' if revision.dirty else ''}"
    _section(console, "versions", {**versions(), "source": source})
    features = _print_device(console, device)
    _section(console, "data", _data_lines())
    if any(f.needed and not f.works for f in features):
        raise typer.Exit(EXIT_FAILED)


def diagnose(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION",
            help="A function without arguments that returns (split, x, y): your model and one batch.",
        ),
    ],
    K: Annotated[int, typer.Option("--K", help="Tangents per estimate.", min=1)] = 8,
    draws: Annotated[int, typer.Option(help="Estimates to measure the variance from.", min=2)] = 100,
    steps: Annotated[int | None, typer.Option(help="Training steps you can afford.", min=1)] = None,
    seed: Annotated[
        int,
        typer.Option(
            help="Seed of the tangents, and of the random numbers that your function draws.", min=0, max=2**32 - 1
        ),
    ] = 0,
) -> None:
    """Measure how noisy the methods are on your own model, and recommend one with its settings."""
    make = _load(target)
    import torch

    from splitfg import diagnose as measure

    _seed_everything(seed)
    split, x, y = _require_problem(target, make())
    parameter = next(iter(split.model.parameters()))
    generator = torch.Generator(parameter.device).manual_seed(seed)
    typer.echo(measure(split, x, y, generator=generator, K=K, draws=draws, steps=steps))


def _load(target: str) -> Any:
    """Import the function that ``module:function`` names; the current folder is searched first.

    Raises:
        UsageError: There is no such function, or it needs arguments.
    """
    module, colon, name = target.partition(":")
    if not colon or not module or not name:
        raise UsageError(f"{target!r}: expected MODULE:FUNCTION, as in my_model:build")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UsageError(f"{target!r}: {error}") from error
    function = getattr(found, name, None)
    if not callable(function):
        raise UsageError(f"{module} has no function {name!r}")
    _require_no_arguments(target, function)
    return function


def _require_no_arguments(target: str, function: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C have none
        return
    try:
        signature.bind()
    except TypeError as error:
        raise UsageError(f"{target} needs arguments ({error}); {_EXPECTED}") from error


def _seed_everything(seed: int) -> None:
    """Seed the global generators, from which a function may draw its model and data."""
    import random

    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _require_problem(target: str, made: object) -> tuple[Split, Inputs, Target]:
    """Validate that a function returned ``(split, x, y)``."""
    from splitfg import Split

    if isinstance(made, tuple | list) and len(made) == 3:
        split, x, y = made
        if isinstance(split, Split):
            return split, x, y
        got = f"{type(split).__name__} as the first of three values"
    else:
        got = f"{len(made)} values" if isinstance(made, tuple | list) else type(made).__name__
    raise UsageError(f"{target} returned {got}; {_EXPECTED}")


def _print_device(console: Console, name: str) -> list[Feature]:
    with console.status("importing torch"):
        import torch

        from splitfg_lab.commands._features import probe_features

        device = resolve_device(name)
    threads = f"{torch.get_num_threads()} threads"
    _section(
        console, "device", {"chosen": describe_device(device), "CPU": threads, "CUDA": torch.version.cuda or "none"}
    )
    console.print("forward mode", style="bold")
    features = []
    with console.status("testing forward-mode features"):
        for feature in probe_features(device):
            features.append(feature)
            mark = Text("yes", "green") if feature.works else Text("no ", "red" if feature.needed else "yellow")
            console.print(Text.assemble("  ", mark, f"  {feature.name}  ", (feature.detail, "dim")))
    return features


def _data_lines() -> dict[str, str]:
    from splitfg.errors import DataError
    from splitfg_lab.data import data_folder, status

    try:
        found = status()
    except DataError as error:
        return {"": str(error)}
    states = ("prepared", "found", "broken", "missing")
    names = {
        state: ", ".join(f"{s.name} ({s.split})" if s.split else s.name for s in found if s.state == state)
        for state in states
    }
    return {"folder": str(data_folder())} | {state: text for state, text in names.items() if text}


def _section(console: Console, title: str, lines: dict[str, str]) -> None:
    console.print(title, style="bold")
    grid = Grid(box=None, show_header=False, padding=(0, 2))
    for name, value in lines.items():
        grid.add_row(name, Text(value, "dim"))
    console.print(grid)
