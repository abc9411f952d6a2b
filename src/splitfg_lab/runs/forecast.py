"""Predict how long a run takes, from its first steps and its first evaluation."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from splitfg_lab.runs.durations import format_duration

_MEASURED_S: Final = 3.0
"""Seconds of training on which a prediction rests."""

_LONG_S: Final = 60.0
"""Shorter times are not announced."""


class Forecast:
    """Announce once how long the remaining steps take, and once how long the remaining evaluations take.

    Args:
        steps: Steps of the whole run.
        evaluations: Returns how many evaluations remain after a step.
        announce: Shows a sentence to the user.
        clock: Returns seconds.
    """

    def __init__(
        self,
        steps: int,
        evaluations: Callable[[int], int],
        announce: Callable[[str], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._steps, self._evaluations, self._announce, self._clock = steps, evaluations, announce, clock
        self._start: tuple[int, float] | None = None
        self._trained = self._evaluated = False

    def step(self, step: int) -> None:
        """Record that the results of a step are known; the first one compiles and allocates and is not timed."""
        now = self._clock()
        if self._start is None:
            self._start = step, now
        first, began = self._start
        if self._trained or step == first or now - began < _MEASURED_S:
            return
        self._trained = True
        each = (now - began) / (step - first)
        left = each * (self._steps - step)
        if left >= _LONG_S:
            count = self._evaluations(step)
            rest = f", not counting {count} evaluation{'s' * (count != 1)}" if count else ""
            self._announce(f"about {format_duration(left)} to go{rest} ({format_duration(each)} per step)")

    def restart(self) -> None:
        """Forget when the steps began, because something else took time in between."""
        self._start = None

    def evaluated(self, step: int, seconds: float) -> None:
        """Record how long an evaluation took."""
        left = seconds * self._evaluations(step)
        if not self._evaluated and left >= _LONG_S:
            each, count = format_duration(seconds), self._evaluations(step)
            self._announce(f"an evaluation takes {each}: the {count} to come add about {format_duration(left)}")
        self._evaluated = True
