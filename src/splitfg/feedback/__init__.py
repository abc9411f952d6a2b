"""Predictions of gradients inside a trunk from u, without a backward pass.

In a trunk with a residual stream, x_{i+1} = x_i + w_i, every write w_i reaches the top of the stream x_L along the
identity path. So r = dL/dx_L, which u gives in closed form, is the exact gradient of every write along that path; a
:class:`Feedback` predicts the whole gradient at a write from it.

In any trunk of layers, a :class:`Route` carries u to every layer through maps that learn from measured responses.
"""

from splitfg.feedback._attention import AttentionMaps
from splitfg.feedback._direct import Direct
from splitfg.feedback._every_nth import EveryNth, Pace
from splitfg.feedback._extended import ExtendedMaps
from splitfg.feedback._gated import GatedMaps
from splitfg.feedback._map_rules import AlignedMaps, DeltaRule, FixedMaps, ForwardDFA, MapRule, Proximal
from splitfg.feedback._maps import Feedback, LearnedMaps, NoiseControl, RandomMaps, UnchangedFeedback
from splitfg.feedback._mean_jacobian import MeanJacobian
from splitfg.feedback._probes import (
    CoarseReadout,
    Difference,
    ForwardDerivative,
    LayerDifference,
    MismatchedPassError,
    Probe,
)
from splitfg.feedback._relay import Relay
from splitfg.feedback._responses import Noise, Response
from splitfg.feedback._route import Route, Shares
from splitfg.feedback._sweep import Swept, sweep
from splitfg.feedback._transposed import Transposed

__all__ = [
    "AlignedMaps",
    "AttentionMaps",
    "CoarseReadout",
    "DeltaRule",
    "Difference",
    "Direct",
    "EveryNth",
    "ExtendedMaps",
    "Feedback",
    "FixedMaps",
    "ForwardDFA",
    "ForwardDerivative",
    "GatedMaps",
    "LayerDifference",
    "LearnedMaps",
    "MapRule",
    "MeanJacobian",
    "MismatchedPassError",
    "Noise",
    "NoiseControl",
    "Pace",
    "Probe",
    "Proximal",
    "RandomMaps",
    "Relay",
    "Response",
    "Route",
    "Shares",
    "Swept",
    "Transposed",
    "UnchangedFeedback",
    "sweep",
]
