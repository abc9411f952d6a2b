"""The command line: ``splitfg ls``, ``run``, ``resume``, ``report`` and the rest."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typer import Typer

_HELP = """Train networks without a backward pass through their trunk, and rerun every table of the paper.

`splitfg ls` shows what can be run, `splitfg run TARGET` runs it, `splitfg report` sets it beside the paper.

Exit codes: 0 all is well, 1 something failed or diverged, 2 wrong usage, 130 interrupted.
"""


def main() -> None:
    """Run the command line; errors meant for people become their message and an exit code."""
    try:
        app = make_app()
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit("The command line needs more packages: pip install 'splitfg[runs]'")
    from splitfg_lab.commands.errors import FOR_PEOPLE, exit_code

    try:
        app(prog_name="splitfg")
    except FOR_PEOPLE as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(exit_code(error))


def make_app() -> Typer:
    """All verbs together."""
    import typer

    from splitfg_lab.commands import browse, check, data, report, run

    app = typer.Typer(name="splitfg", help=_HELP, no_args_is_help=True, pretty_exceptions_show_locals=False)
    app.command()(browse.ls)
    app.command()(browse.show)
    app.command()(run.run)
    app.command()(run.resume)
    app.command()(run.demo)
    app.command()(report.report)
    app.add_typer(report.results_app, name="results")
    app.add_typer(data.data_app, name="data")
    app.command()(check.diagnose)
    app.command()(check.doctor)
    return app


if __name__ == "__main__":
    main()
