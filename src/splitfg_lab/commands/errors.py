"""Exit codes, and the errors whose message is meant for people."""

from __future__ import annotations

from splitfg.errors import DataError, SplitError
from splitfg_lab.runs import ConfigError, RunError

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_STOPPED = 130

FOR_PEOPLE = (RunError, DataError, SplitError)


class UsageError(RunError):
    """What was typed names nothing, or makes no sense."""


def exit_code(error: BaseException) -> int:
    """The exit code for an error: 2 for what was typed, 1 for what went wrong."""
    return EXIT_USAGE if isinstance(error, UsageError | ConfigError) else EXIT_FAILED
