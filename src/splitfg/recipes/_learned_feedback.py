"""Learned feedback as a recipe."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from splitfg.errors import raise_if
from splitfg.recipes._methods import MethodRecipe
from splitfg.recipes._registry import Recipe
from splitfg.recipes.checks import below, not_positive

if TYPE_CHECKING:
    from splitfg.estimators import Estimator
    from splitfg.feedback import MapRule, Probe, Route


class MapRuleRecipe(Recipe):
    """Settings of a rule by which maps learn; :meth:`build` makes it."""

    @abstractmethod
    def build(self) -> MapRule:
        """Return the rule."""


@dataclass(frozen=True)
class ProximalRule(MapRuleRecipe):
    """Regularised least-squares steps.

    Attributes:
        rate: Step towards the least-squares solution, in (0, 1].
        ridge: Weight of the current maps against one measurement.
    """

    rate: float = 1.0
    ridge: float = 1.0

    def __post_init__(self) -> None:
        raise_if(not_positive(self, "rate", "ridge"))

    def build(self) -> MapRule:
        """Return :class:`~splitfg.feedback.Proximal`."""
        from splitfg.feedback import Proximal

        return Proximal(self.rate, self.ridge)


@dataclass(frozen=True)
class DeltaMapRule(MapRuleRecipe):
    """Steps along the correlation of noise and unexplained response.

    Attributes:
        rate: Step size of the maps' updates.
    """

    rate: float = 0.1

    def build(self) -> MapRule:
        """Return :class:`~splitfg.feedback.DeltaRule`."""
        from splitfg.feedback import DeltaRule

        return DeltaRule(self.rate)


@dataclass(frozen=True)
class ForwardDFARule(MapRuleRecipe):
    """The running mean of FDFA.

    Attributes:
        rate: Weight of one measurement, in (0, 1].
    """

    rate: float = 0.1

    def build(self) -> MapRule:
        """Return :class:`~splitfg.feedback.ForwardDFA`."""
        from splitfg.feedback import ForwardDFA

        return ForwardDFA(self.rate)


@dataclass(frozen=True)
class FixedRule(MapRuleRecipe):
    """Random maps that stay as they are: feedback alignment.

    Attributes:
        seed: Seed of the maps.
    """

    seed: int = 0

    def build(self) -> MapRule:
        """Return :class:`~splitfg.feedback.FixedMaps`."""
        from splitfg.feedback import FixedMaps

        return FixedMaps(self.seed)


@dataclass(frozen=True)
class AlignedRule(MapRuleRecipe):
    """Random maps turned towards measured Jacobians by their cosine, after GrAPE.

    Attributes:
        seed: Seed of the maps.
        rate: Step size of the maps' updates.
    """

    seed: int = 0
    rate: float = 0.1

    def build(self) -> MapRule:
        """Return :class:`~splitfg.feedback.AlignedMaps`."""
        from splitfg.feedback import AlignedMaps

        return AlignedMaps(self.seed, self.rate)


class RouteRecipe(Recipe):
    """Settings of a route by which u reaches the layers; :meth:`build` makes it."""

    @abstractmethod
    def build(self) -> Route:
        """Return the route, with maps that have not learned yet."""


@dataclass(frozen=True)
class RelayRoute(RouteRecipe):
    """From layer to layer, each with a map of its own response.

    Attributes:
        rule: The rule by which the maps learn; none for the one that suits the probe.
    """

    rule: MapRuleRecipe | None = None

    def build(self) -> Route:
        """Return :class:`~splitfg.feedback.Relay`."""
        from splitfg.feedback import Relay

        return Relay(None if self.rule is None else self.rule.build())


@dataclass(frozen=True)
class DirectRoute(RouteRecipe):
    """Straight from the last layer to every other.

    Attributes:
        rule: The rule by which the maps learn.
    """

    rule: MapRuleRecipe = field(default_factory=lambda: ProximalRule(rate=0.3))

    def build(self) -> Route:
        """Return :class:`~splitfg.feedback.Direct`."""
        from splitfg.feedback import Direct

        return Direct(self.rule.build())


@dataclass(frozen=True)
class EveryNthRoute(RouteRecipe):
    """A route whose maps are measured at every n-th step only.

    Attributes:
        every: Steps from one measurement to the next.
        route: The route.

    Example:
        >>> from splitfg.recipes import EveryNthRoute, LearnedFeedbackMethod
        >>> LearnedFeedbackMethod(EveryNthRoute(4)).build().route
        Relay(every=4)
    """

    every: int
    route: RouteRecipe = field(default_factory=RelayRoute)

    def __post_init__(self) -> None:
        raise_if(below(1, self, "every"))

    def build(self) -> Route:
        """Return the route, which measures seldom."""
        route = self.route.build()
        route.every = self.every
        return route


class ProbeRecipe(Recipe):
    """Settings of how responses to noise are measured; :meth:`build` makes the probe."""

    @abstractmethod
    def build(self) -> Probe:
        """Return the probe."""


@dataclass(frozen=True)
class DifferenceProbe(ProbeRecipe):
    """Differences of forward passes.

    Attributes:
        step: Size of the noise, relative to the root mean square of the perturbed values.
        central: Use central differences instead of one-sided ones, for a second forward pass.
    """

    step: float = 1.0
    central: bool = False

    def __post_init__(self) -> None:
        raise_if(not_positive(self, "step"))

    def build(self) -> Probe:
        """Return :class:`~splitfg.feedback.Difference`."""
        from splitfg.feedback import Difference

        return Difference(self.step, self.central)


@dataclass(frozen=True)
class LayerProbe(ProbeRecipe):
    """Differences of single layers, each run alone.

    Attributes:
        step: Size of the noise, relative to the root mean square of the perturbed values.
    """

    step: float = 1.0

    def __post_init__(self) -> None:
        raise_if(not_positive(self, "step"))

    def build(self) -> Probe:
        """Return :class:`~splitfg.feedback.LayerDifference`."""
        from splitfg.feedback import LayerDifference

        return LayerDifference(self.step)


@dataclass(frozen=True)
class CoarseProbe(ProbeRecipe):
    """Differences of readings with few bits, or with noise.

    Attributes:
        step: How far outputs are perturbed, relative to their root mean square.
        bits: Bits of a reading; ``None`` for exact readings.
        noise: Standard deviation of a reading's noise, relative to what is read.
    """

    step: float = 1.0
    bits: int | None = None
    noise: float = 0.0

    def __post_init__(self) -> None:
        raise_if(not_positive(self, "step") + below(1, self, "bits") + below(0, self, "noise"))

    def build(self) -> Probe:
        """Return :class:`~splitfg.feedback.CoarseReadout`."""
        from splitfg.feedback import CoarseReadout, Difference

        return CoarseReadout(Difference(self.step), self.bits, self.noise)


@dataclass(frozen=True)
class DerivativeProbe(ProbeRecipe):
    """One Jacobian-vector product by forward mode."""

    def build(self) -> Probe:
        """Return :class:`~splitfg.feedback.ForwardDerivative`."""
        from splitfg.feedback import ForwardDerivative

        return ForwardDerivative()


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
