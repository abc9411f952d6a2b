"""The command line: ``splitfg ls``, ``run``, ``resume``, ``report`` and the other verbs."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typer import Typer

_HELP = """Train networks without a backward pass through their trunk, and reproduce every table of the paper.

Start with `splitfg demo`. `splitfg ls` lists the experiments, `splitfg run TARGET` runs one, and `splitfg report` \
compares the results with the paper's.

Exit codes: 0 success, 1 a run failed or diverged, 2 wrong usage, 130 interrupted.
"""


def main() -> None:
    """Run the command line and exit; expected errors and Ctrl-C are printed without a traceback."""
    try:
        app = make_app()
        code = _call(app)
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich", "filelock"):
            raise
        sys.exit("The command line needs more packages: pip install 'splitfg[runs]'")
    except KeyboardInterrupt:  # while modules are imported; typer and commands handle it later
        sys.exit(128 + signal.SIGINT)
    sys.exit(code)


def _call(app: Typer) -> int:
    """Run a command and return its exit code."""
    from splitfg_lab.commands.errors import EXIT_FAILED, EXPECTED, exit_code
    from splitfg_lab.commands.output import (
        discard_output,
        explain,
        flush_output,
        is_closed_pipe,
        print_error,
        use_any_encoding,
    )

    use_any_encoding()
    try:
        code = _exit_code_of(app)
        flush_output()
    except EXPECTED as error:
        print_error(str(error))
        return exit_code(error)
    except OSError as error:
        discard_output()
        if not is_closed_pipe(error):
            print_error(explain(error))
        return EXIT_FAILED
    return code


def _exit_code_of(app: Typer) -> int:
    try:
        app(prog_name="splitfg")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def make_app() -> Typer:
    """Build the application with all verbs."""
    import typer

    from splitfg_lab.commands import browse, check, data, report, run, tune, version

    app = typer.Typer(name="splitfg", help=_HELP, no_args_is_help=True, pretty_exceptions_show_locals=False)
    app.callback()(version.show_version)
    app.command()(browse.ls)
    app.command()(browse.show)
    app.command()(run.run)
    app.command()(run.resume)
    app.command()(run.demo)
    app.command()(report.report)
    app.add_typer(report.results_app, name="results")
    app.add_typer(data.data_app, name="data")
    app.command()(tune.tune)
    app.add_typer(tune.onnx_app, name="onnx")
    app.command()(check.diagnose)
    app.command()(check.doctor)
    return app


if __name__ == "__main__":
    main()
