"""Places inside a trunk: looking at what its modules read and write there, and closed forms around them."""

from splitfg.sites._activities import Activities, ActivityTrunk
from splitfg.sites._layers import LocalLayer, layer_gradients, under
from splitfg.sites._path import ResidualPath, ResidualTrunk
from splitfg.sites._pullback import ClosedForm, pull_back
from splitfg.sites._taps import shifted, tapped

__all__ = [
    "Activities",
    "ActivityTrunk",
    "ClosedForm",
    "LocalLayer",
    "ResidualPath",
    "ResidualTrunk",
    "layer_gradients",
    "pull_back",
    "shifted",
    "tapped",
    "under",
]
