"""Settings of learned feedback that several experiments share."""

from __future__ import annotations

from splitfg.recipes import (
    DeltaMapRule,
    DifferenceProbe,
    EveryNthRoute,
    LayerProbe,
    LearnedFeedbackMethod,
    ProximalRule,
    RelayRoute,
    RouteRecipe,
)

LAYERS_ALONE = LearnedFeedbackMethod(RelayRoute(DeltaMapRule(1.0)), LayerProbe())
"""Every layer measured by itself, which is the default, with its settings spelt out."""


def by_passes(route: RouteRecipe | None = None) -> LearnedFeedbackMethod:
    """Return learned feedback that measures by a second forward pass."""
    return LearnedFeedbackMethod(RelayRoute(ProximalRule()) if route is None else route, DifferenceProbe())


def every_nth(n: int) -> LearnedFeedbackMethod:
    """Return learned feedback that measures by a second forward pass at every n-th step."""
    return by_passes(EveryNthRoute(n, RelayRoute(ProximalRule())))
