"""``data``: list, fetch, prepare and verify data sets."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from splitfg_lab.commands._listing import listing_console, print_rows
from splitfg_lab.commands._options import Json, complete_data
from splitfg_lab.commands.errors import EXIT_FAILED, UsageError
from splitfg_lab.commands.output import print_coloured

data_app = typer.Typer(no_args_is_help=True, help="List, fetch, prepare and verify data sets.")

Names = Annotated[list[str], typer.Argument(metavar="NAME", help="Data sets.", autocompletion=complete_data)]
NamesOrAll = Annotated[
    list[str] | None,
    typer.Argument(metavar="NAME", help="Data sets; all prepared ones if none.", autocompletion=complete_data),
]
Folder = Annotated[
    Path | None, typer.Option("--folder", help="Data folder; default: SPLITFG_DATA, else the cache folder.")
]

_COLOURS = {"prepared": "green", "found": "yellow", "missing": "dim", "broken": "red"}


@data_app.command()
def ls(folder: Folder = None, as_json: Json = False) -> None:
    """List data sets and their state."""
    from splitfg_lab.data import data_folder, status

    found = status(folder)
    if as_json:
        typer.echo(json.dumps([vars(s) | {"path": s.path and str(s.path)} for s in found], indent=2))
        return
    console = listing_console()
    console.print(Text(f"in {folder or data_folder()}", "dim"))
    names = (f"{s.name} ({s.split})" if s.split else s.name for s in found)
    rows = zip(names, found, strict=True)
    print_rows(console, [(n, Text(s.state, _COLOURS[s.state]), Text(s.detail, "dim")) for n, s in rows])


@data_app.command()
def fetch(
    names: Names,
    folder: Folder = None,
    mirror: Annotated[str | None, typer.Option(help="Download the files from this address instead.")] = None,
) -> None:
    """Download the public files of data sets; resume interrupted downloads."""
    from splitfg_lab.data import fetch as fetch_data

    _require_known(names)
    for name in names:
        with _progress() as on_progress:
            files = fetch_data(name, folder, on_progress, mirror=mirror)
        typer.echo(f"{name}: {', '.join(map(str, files))}")


@data_app.command()
def prepare(
    names: Names,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from", help="File, folder or archive of one data set; default: the raw files in the data folder."
        ),
    ] = None,
    folder: Folder = None,
) -> None:
    """Prepare data sets from your files, or from raw files in the data folder."""
    from splitfg_lab.data import prepare as prepare_data

    _require_known(names)
    if source is not None and len(names) > 1:
        raise UsageError(f"--from is one data set's: prepare {' and '.join(names)} one by one")
    for name in names:
        with _progress() as on_progress:
            folders = prepare_data(name, source, folder, on_progress)
        typer.echo(f"{name}: {', '.join(map(str, folders))}")


@data_app.command()
def verify(names: NamesOrAll = None, folder: Folder = None) -> None:
    """Verify prepared data: hash and count it again."""
    from splitfg_lab.data import status, verify as verify_data

    _require_known(names or [])
    chosen = names or sorted({s.name for s in status(folder) if s.state in ("prepared", "broken")})
    failed = False
    for name in chosen:
        problems = verify_data(name, folder)
        failed |= bool(problems)
        print_coloured(f"{name}: {'; '.join(problems) or 'intact'}", "red" if problems else "green")
    if not chosen:
        typer.echo("no data set is prepared yet")
    if failed:
        raise typer.Exit(EXIT_FAILED)


def _require_known(names: Sequence[str]) -> None:
    """Raise `UsageError` for unknown names, and suggest the nearest ones."""
    from splitfg.errors import DataError
    from splitfg_lab.data import find_dataset

    problems = []
    for name in names:
        try:
            find_dataset(name)
        except DataError as error:
            problems.append(str(error))
    if problems:
        raise UsageError("\n".join(problems))


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int | None], None]]:
    """Show a progress bar per file in a terminal, and nothing elsewhere."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        tasks: dict[str, TaskID] = {}

        def update(name: str, done: int, total: int | None) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=total)
            bars.update(tasks[name], completed=done, total=total)

        yield update
