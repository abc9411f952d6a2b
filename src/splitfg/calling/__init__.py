"""Calls of modules with other parameters, after which the module is as it was."""

from splitfg.calling._call import Places, call, places_of
from splitfg.calling._effects import Following, Observed, Traits
from splitfg.calling._restore import ForwardState, forward_state, preserved, restored, same_generators

__all__ = [
    "Following",
    "ForwardState",
    "Observed",
    "Places",
    "Traits",
    "call",
    "forward_state",
    "places_of",
    "preserved",
    "restored",
    "same_generators",
]
