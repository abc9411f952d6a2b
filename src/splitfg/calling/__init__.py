"""Calls of modules with other parameters, after which the module is as it was."""

from splitfg.calling._call import Places, call, eager_parts, places_of
from splitfg.calling._effects import Following, Observed, Traits
from splitfg.calling._restore import (
    ForwardState,
    RandomState,
    drawing_from,
    forward_state,
    preserved,
    random_state,
    restored,
    same_generators,
)

__all__ = [
    "Following",
    "ForwardState",
    "Observed",
    "Places",
    "RandomState",
    "Traits",
    "call",
    "drawing_from",
    "eager_parts",
    "forward_state",
    "places_of",
    "preserved",
    "random_state",
    "restored",
    "same_generators",
]
