"""Tangents: distributions of random directions in the flat space of the trunk's parameters."""

from splitfg.tangents._conditioned import Conditioned, RunningMagnitude
from splitfg.tangents._laws import Gaussian, Orthogonal, Rademacher, TangentLaw
from splitfg.tangents._layout import Layout
from splitfg.tangents._rows import RowGenerator, row_noise
from splitfg.tangents._source import TangentSource

__all__ = [
    "Conditioned",
    "Gaussian",
    "Layout",
    "Orthogonal",
    "Rademacher",
    "RowGenerator",
    "RunningMagnitude",
    "TangentLaw",
    "TangentSource",
    "row_noise",
]
