"""Recipes of the routes by which u reaches the layers."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from splitfg.errors import raise_if
from splitfg.recipes._map_rules import MapRuleRecipe, ProximalRule
from splitfg.recipes._registry import Recipe
from splitfg.recipes.checks import below

if TYPE_CHECKING:
    from splitfg.feedback import Route


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
