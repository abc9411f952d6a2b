"""Counts over all sessions of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime


def utc_now() -> str:
    """Return the time in UTC, in ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass
class Books:
    """Counts over all sessions of a run; every checkpoint stores them.

    ``warm_*`` are the first steps of each session, which compile and allocate. ``jvps``, ``trunk_backward`` and
    ``block_backward`` are ``None`` until :meth:`RunContext.count` receives them. ``side_by_side`` is the largest number
    of runs that shared the machine in any session, ``None`` if a session did not know it.
    """

    started: str = field(default_factory=utc_now)
    wall_s: float = 0.0
    steps: int = 0
    warm_steps: int = 0
    warm_s: float = 0.0
    timed_steps: int = 0
    timed_s: float = 0.0
    jvps: float | None = None
    trunk_backward: float | None = None
    block_backward: float | None = None
    peak_memory_mib: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    side_by_side: int | None = None

    @property
    def step_ms(self) -> float | None:
        """Milliseconds per step, without the warm-up if any later step was timed."""
        if self.timed_steps:
            return 1e3 * self.timed_s / self.timed_steps
        return 1e3 * self.warm_s / self.warm_steps if self.warm_steps else None

    def per_step(self, total: float | None) -> float | None:
        """Divide a count by the number of steps; ``None`` if it was not counted."""
        return None if total is None or not self.steps else total / self.steps

    def count(self, steps: int, seconds: float, *, warm: bool) -> None:
        """Add steps and the seconds they took.

        Args:
            steps: How many.
            seconds: How long they took together.
            warm: Whether earlier steps of the same process have compiled and allocated.
        """
        self.steps += steps
        if warm:
            self.timed_steps += steps
            self.timed_s += seconds
        else:
            self.warm_steps += steps
            self.warm_s += seconds

    def add(self, *, jvps: float | None, trunk_backward: float | None, block_backward: float | None) -> None:
        """Add Jacobian-vector products and reverse passes; those that are ``None`` were not counted."""
        self.jvps = _sum(self.jvps, jvps)
        self.trunk_backward = _sum(self.trunk_backward, trunk_backward)
        self.block_backward = _sum(self.block_backward, block_backward)


def _sum(total: float | None, more: float | None) -> float | None:
    return total if more is None else (total or 0.0) + more
