"""Learning rate schedules: a factor for every step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol


class Schedule(Protocol):
    """Maps a step, counted from 0, to the factor on every group's learning rate."""

    def __call__(self, step: int) -> float:
        """Return the factor for this step."""


@dataclass(frozen=True)
class Constant:
    """A constant factor of one, which leaves the learning rates to the optimizer."""

    def __call__(self, step: int) -> float:  # noqa: ARG002
        """Return 1."""
        return 1.0


@dataclass(frozen=True)
class CosineWithWarmup:
    """Linear warmup to one, then a cosine decay to zero at ``total``.

    The factor is (step + 1) / warmup during the warmup, then (1 + cos π t) / 2 with t from 0 to 1.

    Args:
        total: Number of training steps.
        warmup: Number of warmup steps.

    Raises:
        ValueError: If ``warmup`` is outside [0, total).

    Example:
        >>> import splitfg
        >>> schedule = splitfg.CosineWithWarmup(total=10, warmup=2)
        >>> [round(schedule(step), 2) for step in (0, 1, 2, 6, 10)]
        [0.5, 1.0, 1.0, 0.5, 0.0]
    """

    total: int
    warmup: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.warmup < self.total:
            raise ValueError(f"warmup must be in [0, total), got warmup={self.warmup}, total={self.total}")

    def __call__(self, step: int) -> float:
        """Return the factor for this step."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        done = min(1.0, (step - self.warmup) / (self.total - self.warmup))
        return 0.5 * (1.0 + math.cos(math.pi * done))
