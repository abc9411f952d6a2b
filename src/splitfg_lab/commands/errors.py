"""Exit codes, and the errors that the command line prints without a traceback."""

from __future__ import annotations

from splitfg.errors import DataError, SplitError
from splitfg_lab.runs import ConfigError, RunError

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_LOST = 75
"""Of several processes one is gone; a restart may go on from the last checkpoint."""

EXIT_STOPPED = 130

EXPECTED = (RunError, DataError, SplitError)


class UsageError(RunError):
    """An argument or option is wrong."""


def exit_code(error: BaseException) -> int:
    """Return the exit code for an error: 2 for a wrong argument, 1 for a failure."""
    return EXIT_USAGE if isinstance(error, UsageError | ConfigError) else EXIT_FAILED
