"""The one error of this room, which lists everything that is wrong and says what to do; and its one warning."""

from __future__ import annotations

from collections.abc import Sequence


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


class PreparedAgainWarning(UserWarning):
    """Raw files were replaced by others since data was prepared from them, so that it is prepared again."""


def shorten(items: Sequence[object], limit: int = 8) -> str:
    """The first few items as text, and how many were left out."""
    shown = ", ".join(str(item) for item in items[:limit])
    return shown if len(items) <= limit else f"{shown} and {len(items) - limit:,} more"
