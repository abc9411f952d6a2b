"""Errors that list every problem at once, each with its cure."""

from __future__ import annotations

from collections.abc import Sequence


class SplitError(ValueError):
    """A split, a batch or a setting that cannot work; raised before any computation starts.

    Attributes:
        problems: Every problem, one sentence each.

    Example:
        >>> import splitfg
        >>> splitfg.ForwardMode(chunk=0)
        Traceback (most recent call last):
        ...
        splitfg.errors.SplitError: chunk must be at least 1 (or None for all), got 0
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(f"- {p}" for p in self.problems) if len(problems) > 1 else problems[0])

    def __reduce__(self) -> tuple[type[SplitError], tuple[tuple[str, ...]]]:
        """Rebuild from the problems: pickling by ``args`` would pass the formatted message instead."""
        return type(self), (self.problems,)


def raise_if(problems: Sequence[str]) -> None:
    """Raise :class:`SplitError` if the list of problems is not empty."""
    if problems:
        raise SplitError(problems)


class NonFiniteError(SplitError):
    """h, the loss or a score is NaN or infinite: training has diverged, or the input was not finite."""


class LostRankError(RuntimeError):
    """A process of several has died, hangs, or was never there: a collective operation failed or timed out."""


class DataError(ValueError):
    """Data that is missing, damaged or inconsistent with its description.

    Attributes:
        problems: Every problem, one sentence each.
        hint: The cure; may be empty.
    """

    def __init__(self, what: str, problems: Sequence[str] = (), hint: str = "") -> None:
        self.problems = tuple(problems) or (what,)
        self.hint = hint
        lines = [what + (":" if problems else "")]
        lines += [f"  - {problem}" for problem in problems]
        lines += [hint] if hint else []
        super().__init__("\n".join(lines))


def shorten(items: Sequence[object], limit: int = 8) -> str:
    """List the first few items as text, followed by the number of omitted ones.

    Example:
        >>> from splitfg.errors import shorten
        >>> shorten(range(5), limit=2)
        '0, 1 and 3 more'
    """
    shown = ", ".join(str(item) for item in items[:limit])
    return shown if len(items) <= limit else f"{shown} and {len(items) - limit:,} more"
