"""``splitfg --version``."""

from __future__ import annotations

from typing import Annotated

import typer


def _print_version(asked: bool) -> None:
    if not asked:
        return
    from splitfg_lab.runs.environment import versions

    found = versions()
    typer.echo(f"splitfg {found.get('splitfg', '(not installed)')}")
    typer.echo("  ".join(f"{name} {found[name]}" for name in ("python", "torch") if name in found))
    raise typer.Exit


def show_version(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Handle the options that come before the verb."""
