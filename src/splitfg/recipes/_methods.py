"""Gradient methods as recipes: what a config says, and the estimator built from it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from splitfg.errors import refuse
from splitfg.recipes._checks import below, not_fractions, not_positive

if TYPE_CHECKING:
    from splitfg.estimators import Estimator
    from splitfg.tangents import TangentLaw


@dataclass(frozen=True)
class GaussianLaw:
    """v ~ N(0, I)."""

    def build(self) -> TangentLaw:
        """:class:`~splitfg.Gaussian`."""
        from splitfg.tangents import Gaussian

        return Gaussian()


@dataclass(frozen=True)
class RademacherLaw:
    """v_i = ±1."""

    def build(self) -> TangentLaw:
        """:class:`~splitfg.Rademacher`."""
        from splitfg.tangents import Rademacher

        return Rademacher()


@dataclass(frozen=True)
class OrthogonalLaw:
    """K mutually orthogonal tangents."""

    def build(self) -> TangentLaw:
        """:class:`~splitfg.Orthogonal`."""
        from splitfg.tangents import Orthogonal

        return Orthogonal()


@dataclass(frozen=True)
class ConditionedLaw:
    """Coordinates scaled by a running gradient magnitude to a power."""

    beta: float = 0.99
    power: float = 1.0
    floor: float = 0.1

    def __post_init__(self) -> None:
        refuse(not_fractions(self, "beta"))

    def build(self) -> TangentLaw:
        """:class:`~splitfg.Conditioned`, on a magnitude that the learner updates."""
        from splitfg.tangents import Conditioned, RunningMagnitude

        return Conditioned(RunningMagnitude(self.beta), self.power, self.floor)


LawRecipe: TypeAlias = GaussianLaw | RademacherLaw | OrthogonalLaw | ConditionedLaw


class MethodRecipe(ABC):
    """Settings of a gradient method; :meth:`build` makes its estimator."""

    @abstractmethod
    def build(self) -> Estimator:
        """The estimator."""


@dataclass(frozen=True)
class FrozenMethod(MethodRecipe):
    """The trunk stays as it is; the head is trained exactly."""

    def build(self) -> Estimator:
        """:class:`~splitfg.FrozenTrunk`."""
        from splitfg.estimators import FrozenTrunk

        return FrozenTrunk()


@dataclass(frozen=True)
class BackpropMethod(MethodRecipe):
    """Reverse mode through everything."""

    closed_head: bool = False
    readout_only: bool = False

    def build(self) -> Estimator:
        """:class:`~splitfg.Backprop`."""
        from splitfg.estimators import Backprop

        return Backprop(self.closed_head, self.readout_only)


@dataclass(frozen=True)
class SplitFGMethod(MethodRecipe):
    """Exact head, K tangents in the trunk; ``chunk`` of them ride together.

    ``lean`` computes the head's gradients after the tangents, at the price of computing its outputs twice; what a run
    finds is the same.
    """

    K: int = 4
    chunk: int | None = None
    law: LawRecipe = field(default_factory=GaussianLaw)
    lean: bool = False

    def __post_init__(self) -> None:
        refuse(below(1, self, "K", "chunk"))

    def build(self) -> Estimator:
        """:class:`~splitfg.SplitFG`."""
        from splitfg.engines import ForwardMode
        from splitfg.estimators import SplitFG

        return SplitFG(self.K, self.law.build(), ForwardMode(self.chunk), lean=self.lean)


@dataclass(frozen=True)
class ActivityMethod(MethodRecipe):
    """Exact head, K tangents at what the trunk's layers write, a score for every row; ``chunk`` ride together."""

    K: int = 8
    chunk: int | None = None

    def __post_init__(self) -> None:
        refuse(below(1, self, "K", "chunk"))

    def build(self) -> Estimator:
        """:class:`~splitfg.ActivityFG`, on the trunk's own ``activities()``."""
        from splitfg.engines import ForwardMode
        from splitfg.estimators import ActivityFG

        return ActivityFG(self.K, engine=ForwardMode(self.chunk))


@dataclass(frozen=True)
class PureFGMethod(MethodRecipe):
    """K tangents over trunk and head alike."""

    K: int = 4
    chunk: int | None = None

    def __post_init__(self) -> None:
        refuse(below(1, self, "K", "chunk"))

    def build(self) -> Estimator:
        """:class:`~splitfg.ForwardGradient`."""
        from splitfg.engines import ForwardMode
        from splitfg.estimators import ForwardGradient

        return ForwardGradient(self.K, engine=ForwardMode(self.chunk))


@dataclass(frozen=True)
class EvolutionMethod(MethodRecipe):
    """K antithetic pairs of evaluations at distance sigma."""

    K: int = 4
    sigma: float = 1e-3

    def __post_init__(self) -> None:
        refuse(below(1, self, "K") + not_positive(self, "sigma"))

    def build(self) -> Estimator:
        """:class:`~splitfg.EvolutionStrategy`."""
        from splitfg.estimators import EvolutionStrategy

        return EvolutionStrategy(self.K, self.sigma)
