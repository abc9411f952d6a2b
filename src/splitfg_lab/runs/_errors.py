"""Errors of runs; every message names the cause and the cure."""

from __future__ import annotations

from collections.abc import Sequence


class RunError(Exception):
    """A run, its folder or its files cannot be used."""


class ConfigError(RunError):
    """A config has wrong, missing or unknown fields.

    Attributes:
        problems: Everything that is wrong with it, one sentence each.
    """

    def __init__(self, problems: Sequence[str], *, what: str = "the config") -> None:
        self.problems = tuple(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__(f"{count} in {what}:\n" + "\n".join(f"  {p}" for p in self.problems))


class CheckpointError(RunError):
    """A checkpoint cannot be written or read."""


class DivergedError(RunError):
    """The loss, a metric or a parameter is not finite any more.

    Attributes:
        step: The first step known to be affected.
    """

    def __init__(self, step: int, reason: str) -> None:
        self.step = step
        super().__init__(f"diverged at step {step:,}: {reason}")


class StoppedError(RunError):
    """A signal asked the run to stop, and the run has written its checkpoint.

    Attributes:
        step: The step from which it resumes.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        super().__init__(f"stopped after step {step:,}")


class PhaseStoppedError(RunError):
    """A signal asked the run to stop during a phase such as an evaluation; :func:`fit` saves and stops."""
