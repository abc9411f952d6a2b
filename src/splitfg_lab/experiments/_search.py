"""Settings of a line search in configs of training runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from splitfg.errors import raise_if
from splitfg.recipes.checks import below, not_positive


@dataclass(frozen=True)
class Search:
    """Start of a line search; the defaults are those of :class:`~splitfg.LineSearch`.

    Attributes:
        start: rho of the first step.
        calm: Measurements over which rho changes at a constant pace.
    """

    start: float = 1.0
    calm: int = 1000

    def __post_init__(self) -> None:
        raise_if(not_positive(self, "start") + below(0, self, "calm"))


def search_problems(search: Search, *, adaptive: bool) -> list[str]:
    """Return the problems of the settings of a line search in a config: without one, they must be the defaults."""
    return [] if adaptive or search == Search() else ["search is that of a line search: set adaptive=true"]


FAST = Search(start=0.3, calm=100)
"""A search that follows the first steps at once."""

BEFORE: tuple[tuple[str, Any], ...] = (("search", {"type": "Search", "start": 1.0, "calm": 1000}),)
"""The value of the field for configs that were recorded without it."""
