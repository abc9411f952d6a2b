"""Recipes of methods with learned feedback."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from splitfg.errors import raise_if
from splitfg.recipes._map_rules import AlignedRule
from splitfg.recipes._methods import MethodRecipe
from splitfg.recipes._probes import ProbeRecipe
from splitfg.recipes._routes import RelayRoute, RouteRecipe
from splitfg.recipes.checks import below

if TYPE_CHECKING:
    from splitfg.estimators import Estimator


@dataclass(frozen=True)
class LearnedFeedbackMethod(MethodRecipe):
    """Exact head; u reaches every layer through maps that learn from measured responses.

    Attributes:
        route: The route by which u reaches the layers.
        probe: Measures the responses from which the maps learn; none for the one that suits route and trunk.
    """

    name: ClassVar[str] = "learned_feedback"

    route: RouteRecipe = field(default_factory=RelayRoute)
    probe: ProbeRecipe | None = None

    def build(self) -> Estimator:
        """Return :class:`~splitfg.LearnedFeedback`."""
        from splitfg.estimators import LearnedFeedback

        return LearnedFeedback(self.route.build(), None if self.probe is None else self.probe.build())


@dataclass(frozen=True)
class AnchoredFeedbackMethod(MethodRecipe):
    """GrAPE's aligned feedback with steps of backpropagation as anchors: a baseline, not forward-only.

    Attributes:
        every: Steps from one anchor to the next.
        rule: Turns the maps towards Jacobians.
    """

    name: ClassVar[str] = "anchored_feedback"

    every: int = 100
    rule: AlignedRule = field(default_factory=AlignedRule)

    def __post_init__(self) -> None:
        raise_if(below(1, self, "every"))

    def build(self) -> Estimator:
        """Return :class:`~splitfg.estimators.AnchoredFeedback`."""
        from splitfg.estimators import AnchoredFeedback, LearnedFeedback
        from splitfg.feedback import Direct, Pace

        return AnchoredFeedback(LearnedFeedback(Direct(self.rule.build())), Pace(self.every))


@dataclass(frozen=True)
class PredictedActivityMethod(MethodRecipe):
    """Activity tangents that estimate only what learned feedback leaves: unbiased.

    Attributes:
        K: Number of tangents per step.
        chunk: Tangents per forward pass; none for all at once, 1 for the least memory.
        feedback: The prediction that the tangents correct.
    """

    name: ClassVar[str] = "predicted_activity_fg"
    for_tables: ClassVar[Mapping[str, Any]] = {"chunk": 2}

    K: int = 8
    chunk: int | None = None
    feedback: LearnedFeedbackMethod = field(default_factory=LearnedFeedbackMethod)

    def __post_init__(self) -> None:
        raise_if(below(1, self, "K", "chunk"))

    def build(self) -> Estimator:
        """Return :class:`~splitfg.ActivityFG` with a prediction."""
        from splitfg.engines import ForwardMode
        from splitfg.estimators import ActivityFG, LearnedFeedback

        prediction = self.feedback.build()
        assert isinstance(prediction, LearnedFeedback)
        return ActivityFG(self.K, engine=ForwardMode(self.chunk), prediction=prediction)
