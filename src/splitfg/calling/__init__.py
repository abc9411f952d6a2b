"""Calls of modules with other parameters, after which the module is as it was."""

from splitfg.calling._call import Places, call, computed_anew, eager_code, eager_parts, places_of
from splitfg.calling._effects import (
    Flags,
    Following,
    Observed,
    Traits,
    modules_of,
    registered_modules,
    updates_statistics,
)
from splitfg.calling._generators import RandomState, drawing_from, random_state, same_generators
from splitfg.calling._restore import ForwardState, forward_state, preserved, restored, version_of

__all__ = [
    "Flags",
    "Following",
    "ForwardState",
    "Observed",
    "Places",
    "RandomState",
    "Traits",
    "call",
    "computed_anew",
    "drawing_from",
    "eager_code",
    "eager_parts",
    "forward_state",
    "modules_of",
    "places_of",
    "preserved",
    "random_state",
    "registered_modules",
    "restored",
    "same_generators",
    "updates_statistics",
    "version_of",
]
