"""What can go wrong with a run, as errors that say what to do next."""

from __future__ import annotations

from collections.abc import Sequence


class RunError(Exception):
    """Something about a run, its folder or its files is wrong; the message is meant for people."""


class ConfigError(RunError):
    """A config that cannot be used.

    Attributes:
        problems: Everything that is wrong with it, one sentence each.
    """

    def __init__(self, problems: Sequence[str], *, what: str = "the config") -> None:
        self.problems = tuple(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__(f"{count} in {what}:\n" + "\n".join(f"  {p}" for p in self.problems))


class CheckpointError(RunError):
    """A checkpoint that cannot be written or read back."""


class DivergedError(RunError):
    """The loss, a metric or a parameter is no longer finite: going on would only waste time.

    Attributes:
        step: The first step known to be affected.
    """

    def __init__(self, step: int, reason: str) -> None:
        self.step = step
        super().__init__(f"diverged at step {step:,}: {reason}")


class StoppedError(RunError):
    """The run was asked to stop, and its checkpoint is written.

    Attributes:
        step: The step it will go on from.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        super().__init__(f"stopped after step {step:,}")
