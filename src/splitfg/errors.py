"""One error that lists everything that is wrong, and says what to do."""

from __future__ import annotations

from collections.abc import Sequence


class SplitError(ValueError):
    """Raised before anything is computed from a split, a batch or a setting that cannot work.

    Attributes:
        problems: Everything that is wrong, one sentence each.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(f"- {p}" for p in self.problems) if len(problems) > 1 else problems[0])

    def __reduce__(self) -> tuple[type[SplitError], tuple[tuple[str, ...]]]:
        """Made again from its problems, in another process too."""
        return type(self), (self.problems,)


def raise_if(problems: Sequence[str]) -> None:
    """Raise a :class:`SplitError` if there is any problem."""
    if problems:
        raise SplitError(problems)


class NonFiniteError(SplitError):
    """h or the loss is NaN or infinite: the training has diverged, or the input was not finite."""


class DataError(ValueError):
    """Data that is missing, damaged or not what it claims to be.

    Attributes:
        problems: Everything that is wrong, one sentence each.
        hint: What to do about it; may be empty.
    """

    def __init__(self, what: str, problems: Sequence[str] = (), hint: str = "") -> None:
        self.problems = tuple(problems) or (what,)
        self.hint = hint
        lines = [what + (":" if problems else "")]
        lines += [f"  - {problem}" for problem in problems]
        lines += [hint] if hint else []
        super().__init__("\n".join(lines))


def shorten(items: Sequence[object], limit: int = 8) -> str:
    """The first few items as text, and how many were left out."""
    shown = ", ".join(str(item) for item in items[:limit])
    return shown if len(items) <= limit else f"{shown} and {len(items) - limit:,} more"
