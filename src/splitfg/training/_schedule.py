"""How the learning rate moves: a factor for every step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol


class Schedule(Protocol):
    """Step (counted from 0) to the factor on every group's learning rate."""

    def __call__(self, step: int) -> float:
        """The factor for this step."""


@dataclass(frozen=True)
class Constant:
    """Always one."""

    def __call__(self, step: int) -> float:  # noqa: ARG002
        """1."""
        return 1.0


@dataclass(frozen=True)
class CosineWithWarmup:
    """Linear warmup to one, then a cosine down to zero at ``total``.

    Args:
        total: Steps of the whole budget.
        warmup: Steps of the linear rise.
    """

    total: int
    warmup: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.warmup < self.total:
            raise ValueError(f"warmup must be in [0, total), got warmup={self.warmup}, total={self.total}")

    def __call__(self, step: int) -> float:
        """(step + 1) / warmup, then (1 + cos π t) / 2 with t from 0 to 1."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        done = min(1.0, (step - self.warmup) / (self.total - self.warmup))
        return 0.5 * (1.0 + math.cos(math.pi * done))
