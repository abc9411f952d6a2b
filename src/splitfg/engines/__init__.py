"""Engines: compute h and J·v for a stack of tangents, by forward-mode AD or by finite differences."""

from splitfg.engines._finite_difference import CentralDifference, OneSidedDifference
from splitfg.engines._forward_mode import ForwardMode, forward_jvps

__all__ = ["CentralDifference", "ForwardMode", "OneSidedDifference", "forward_jvps"]
