"""Recipes of the ways in which responses to noise are measured."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from splitfg.errors import raise_if
from splitfg.recipes._registry import Recipe
from splitfg.recipes.checks import below, not_positive

if TYPE_CHECKING:
    from splitfg.feedback import Probe


class ProbeRecipe(Recipe):
    """Settings of how responses to noise are measured; :meth:`build` makes the probe."""

    @abstractmethod
    def build(self) -> Probe:
        """Return the probe."""


@dataclass(frozen=True)
class DifferenceProbe(ProbeRecipe):
    """Differences of forward passes.

    Attributes:
        step: Size of the noise, relative to the root mean square of the perturbed values.
        central: Use central differences instead of one-sided ones, for a second forward pass.
    """

    step: float = 1.0
    central: bool = False

    def __post_init__(self) -> None:
        raise_if(not_positive(self, "step"))

    def build(self) -> Probe:
        """Return :class:`~splitfg.feedback.Difference`."""
        from splitfg.feedback import Difference

        return Difference(self.step, self.central)


@dataclass(frozen=True)
class LayerProbe(ProbeRecipe):
    """Differences of single layers, each run alone.

    Attributes:
        step: Size of the noise, relative to the root mean square of the perturbed values.
    """

    step: float = 1.0

    def __post_init__(self) -> None:
        raise_if(not_positive(self, "step"))

    def build(self) -> Probe:
        """Return :class:`~splitfg.feedback.LayerDifference`."""
        from splitfg.feedback import LayerDifference

        return LayerDifference(self.step)


@dataclass(frozen=True)
class CoarseProbe(ProbeRecipe):
    """Differences of readings with few bits, or with noise.

    Attributes:
        step: How far outputs are perturbed, relative to their root mean square.
        bits: Bits of a reading; ``None`` for exact readings.
        noise: Standard deviation of a reading's noise, relative to what is read.
    """

    step: float = 1.0
    bits: int | None = None
    noise: float = 0.0

    def __post_init__(self) -> None:
        raise_if(not_positive(self, "step") + below(1, self, "bits") + below(0, self, "noise"))

    def build(self) -> Probe:
        """Return :class:`~splitfg.feedback.CoarseReadout`."""
        from splitfg.feedback import CoarseReadout, Difference

        return CoarseReadout(Difference(self.step), self.bits, self.noise)


@dataclass(frozen=True)
class DerivativeProbe(ProbeRecipe):
    """One Jacobian-vector product by forward mode."""

    def build(self) -> Probe:
        """Return :class:`~splitfg.feedback.ForwardDerivative`."""
        from splitfg.feedback import ForwardDerivative

        return ForwardDerivative()
