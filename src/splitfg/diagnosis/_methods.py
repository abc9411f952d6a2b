"""Comparison of the backprop-free methods with the exact gradient of one batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from splitfg.errors import SplitError
from splitfg.estimators import ActivityFG, DirectPath, Estimator, LearnedFeedback, LearningEstimator
from splitfg.splitting import Split
from splitfg.tangents import Layout
from splitfg.types import Engine, Estimate, Inputs, Target

# Estimates to average over.
_DRAWS = 20
MAP_UPDATES = 10
"""Updates of learned maps, at fixed parameters, before their estimate is measured."""

TrunkGradient = Callable[[Estimate], Tensor]
"""Flattens the trunk's part of an estimate."""


@dataclass(frozen=True)
class MethodReport:
    """How well a method estimates the trunk's gradient g on one model and batch.

    Attributes:
        method: The estimator, as code.
        biased: Whether the estimate is biased.
        cosine: Mean cosine similarity of one estimate ĝ with g.
        noise: E‖ĝ - g‖² / ‖g‖².
        obstacle: Why the method does not apply to this model; ``None`` if it does.
        learned: Whether the method learns maps, which were updated ``MAP_UPDATES`` times before the measurement.
        explained: By parameter p, 1 - ‖ĝ_p - g_p‖² / ‖g_p‖², of a method that learns maps: 1 is exact, 0 no better
            than no gradient.
    """

    method: str
    biased: bool = False
    cosine: float = 0.0
    noise: float = float("inf")
    obstacle: str | None = None
    learned: bool = False
    explained: Mapping[str, float] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        return self.line()

    def line(self, width: int = 0) -> str:
        """Format the report in one line, with the method padded to ``width``."""
        if self.obstacle is not None:
            return f"{self.method:<{width}}  does not apply: {self.obstacle}"
        bias = "biased" if self.biased else "unbiased"
        return f"{self.method:<{width}}  cosine {self.cosine:<6.2f} noise/signal {ratio(self.noise):<8} {bias}"


def ratio(value: float) -> str:
    """Format a ratio with three digits; ratios below 0.01 are not told apart."""
    return "<0.01" if value < 0.01 else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


class Deviation:
    """Accumulates cosine similarity and squared error of estimates, without storing them.

    Args:
        g: The exact flat gradient of the trunk.
    """

    def __init__(self, g: Tensor) -> None:
        self.g, self._norm = g.double(), float(g.double().norm())
        self._cosine, self._squares = 0.0, torch.zeros_like(self.g)
        self._count = 0

    def add(self, estimate: Tensor) -> None:
        """Add one flat estimate."""
        found = estimate.double()
        size = self._norm * float(found.norm())
        self._cosine += float(self.g @ found) / size if size > 0 else 0.0
        self._squares += (found - self.g).square()
        self._count += 1

    @property
    def cosine(self) -> float:
        """Mean cosine similarity with g."""
        return self._cosine / self._count

    @property
    def squares(self) -> Tensor:
        """Mean squared difference from g, by entry."""
        return self._squares / self._count

    @property
    def error(self) -> float:
        """Mean squared distance from g."""
        return float(self.squares.sum())

    @property
    def noise(self) -> float:
        """Mean squared distance from g, relative to ‖g‖²."""
        return self.error / self._norm**2 if self._norm > 0 else float("inf")


def other_methods(K: int, engine: Engine) -> Mapping[str, Estimator]:
    """Return the backprop-free estimators to compare with Split-FG, keyed by their code."""
    return {
        f"ActivityFG(K={K})": ActivityFG(K, engine=engine),
        "DirectPath()": DirectPath(),
        "LearnedFeedback()": LearnedFeedback(),
        f"ActivityFG(K={K}, prediction=LearnedFeedback())": ActivityFG(K, engine=engine, prediction=LearnedFeedback()),
    }


def compare(
    split: Split,
    x: Inputs,
    y: Target,
    g: Tensor,
    layout: Layout,
    methods: Mapping[str, Estimator],
    trunk_gradient: TrunkGradient,
    generator: torch.Generator,
) -> list[MethodReport]:
    """Measure every method against the exact gradient ``g``; reports the obstacle if a method does not apply."""
    # a twin records its own validations, so that warnings that are shown once are left to the user's training
    twin = split.twin(split.trunk, split.head)
    return [
        _measured(name, estimator, twin, x, y, Deviation(g), layout, trunk_gradient, generator)
        for name, estimator in methods.items()
    ]


def _measured(
    name: str,
    estimator: Estimator,
    split: Split,
    x: Inputs,
    y: Target,
    deviation: Deviation,
    layout: Layout,
    trunk_gradient: TrunkGradient,
    generator: torch.Generator,
) -> MethodReport:
    learns = isinstance(estimator, LearningEstimator) and bool(estimator.learned_state())
    biased = False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for i in range(MAP_UPDATES + 1 if learns else _DRAWS):
                estimate = estimator(split, x, y, generator=generator)
                if isinstance(estimator, LearningEstimator):
                    estimator.update_state(split, estimate)
                if not learns or i == MAP_UPDATES:
                    deviation.add(trunk_gradient(estimate))
                biased = estimate.stats.biased
    except (SplitError, NotImplementedError, RuntimeError) as error:
        return MethodReport(name, obstacle=_first_line(error))
    explained = _explained(layout, deviation) if learns else {}
    return MethodReport(name, biased, deviation.cosine, deviation.noise, learned=learns, explained=explained)


def _explained(layout: Layout, deviation: Deviation) -> dict[str, float]:
    left, whole = (layout.unflatten(t) for t in (deviation.squares, deviation.g.square()))
    energies = {name: float(part.sum()) for name, part in whole.items()}
    return {name: 1 - float(left[name].sum()) / energy for name, energy in energies.items() if energy > 0}


def _first_line(error: Exception) -> str:
    problems = error.problems if isinstance(error, SplitError) else (str(error),)
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return problems[0].splitlines()[0] + more
