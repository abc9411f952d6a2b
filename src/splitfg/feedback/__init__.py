"""What u already tells about the gradient inside the trunk, without a tangent and without a backward pass.

In a residual trunk x_{i+1} = x_i + w_i every write w_i reaches the top of the stream x_L along the identity path,
whatever else it does on the way. So r = dL/dx_L, which u gives in closed form, is the exact gradient of every
write along that path; a :class:`Feedback` predicts the whole gradient at a write from it.
"""

from splitfg.feedback._maps import Feedback, Identity, MeanJacobian, RandomMaps
from splitfg.feedback._path import ResidualPath, ResidualTrunk
from splitfg.feedback._pullback import pull_back
from splitfg.feedback._taps import tapped
from splitfg.feedback._writes import write_gradients

__all__ = [
    "Feedback",
    "Identity",
    "MeanJacobian",
    "RandomMaps",
    "ResidualPath",
    "ResidualTrunk",
    "pull_back",
    "tapped",
    "write_gradients",
]
