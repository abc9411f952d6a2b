"""Recipes of the rules by which maps learn."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from splitfg.errors import raise_if
from splitfg.recipes._registry import Recipe
from splitfg.recipes.checks import not_positive

if TYPE_CHECKING:
    from splitfg.feedback import MapRule


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
