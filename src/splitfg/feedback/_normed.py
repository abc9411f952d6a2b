"""Learned maps that depend on the scale of the stream's value."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from splitfg.errors import SplitError, raise_if
from splitfg.feedback._extended import ExtendedMaps
from splitfg.feedback._map_rules import rate_problems
from splitfg.numerics import widened
from splitfg.types import Params

_PACE = 0.05
"""How far a measurement moves the moments of σ."""
_FLOOR = 0.05
"""Smallest relative spread of σ. A smaller one is left out: dividing by it would only learn noise."""


class NormedMaps(ExtendedMaps):
    """Mean Jacobians that follow the scale of the stream's value: δ_i = r (J_i + z_i G_i)ᵀ, z_i a number for each row.

    A branch with a norm in front of it reads x / σ(x): σ is the standard deviation over features for a LayerNorm, and
    the root mean square for an RMSNorm. So the Jacobian from a point of the stream to its top is about I + A / σ(x),
    and rows with small values pass more of the gradient through branches. With running means s of σ and s₂ of σ²,

        z_i = ((s_i / σ(x_i) - 1) / c_i) within ±bound,    c_i² = s₂_i / s_i² - 1 + 0.05²,

    has a mean of about 0 and a mean square of about 1, and the delta rule of :class:`MeanJacobian` learns

        rest = dx - Σ_i e_i (J_i + z_i G_i),
        J_i ← J_i + rate / (n + 2 D) Σ over rows of e_iᵀ rest,
        G_i ← G_i + rate / (n + 2 D) Σ over rows of z_i e_iᵀ rest / max(1, mean of z_i²),    n rows, D noises a row.

    The first measurement finds the moments and has z = 0. Exact where the Jacobian is linear in 1 / σ(x) within the
    bound; biased by everything else that varies between rows.

    Takes the stream's values from :class:`~splitfg.ParallelPull`.

    Args:
        rate: How far a step moves the maps.
        bound: Largest z. A nearly constant row has a large 1 / σ, and would otherwise overturn the maps.
        centred: Whether norms subtract the mean over features, as LayerNorm does; ``False`` for RMSNorm.
        every: Measure at every n-th step only.

    Example:
        >>> import torch
        >>> import splitfg
        >>> from splitfg.feedback import NormedMaps
        >>> from splitfg.testing import example_split
        >>> split, x, y = example_split()
        >>> pull = splitfg.ParallelPull(feedback=NormedMaps())
        >>> estimate = pull(split, x, y, generator=torch.Generator().manual_seed(0))
        >>> pull.update_state(split, estimate)
    """

    further: ClassVar[str] = "scaled"

    def __init__(self, rate: float = 0.15, *, bound: float = 4.0, centred: bool = True, every: int = 1) -> None:
        found = rate_problems(rate)
        found += [] if bound > 0 else [f"bound must be positive, got {bound}"]
        raise_if(found)
        super().__init__(rate, every=every)
        self.bound, self.centred = bound, centred
        self._points: Mapping[str, Tensor] = {}

    @property
    def reads_stream(self) -> bool:
        """Return ``True``."""
        return True

    def seeing(self, points: Mapping[str, Tensor]) -> NormedMaps:
        """Return these maps, scaled by the stream's values."""
        seen = copy.copy(self)  # shares the maps
        seen._points = points
        return seen

    def change(self, correlations: Params, *, rows: int, noises: int) -> Params:
        """Scale the correlations by rate / (n + 2 D), and move the moments of σ."""
        scale = self.rate / (rows + 2 * noises)
        moved = Params()
        for name in [name for name in correlations if "/" not in name]:
            moved[name] = scale * correlations[name]
            # a skewed σ gives z a mean square above 1, with which a rate of 1 would diverge
            squares = (correlations[f"{name}/squares"] / rows).clamp_min(1)
            moved[f"{name}/scaled"] = scale * correlations[f"{name}/scaled"] / squares
            moved[f"{name}/moments"] = self._moved_moments(name, correlations[f"{name}/moments"] / rows)
        return moved

    def _columns(self, name: str, e: Tensor) -> Tensor:
        """Return z e."""
        return self._z(name).to(e.dtype).reshape(*e.shape[:-1], 1) * e

    def _back(self, name: str, r: Tensor) -> Tensor:
        """Return z r: a number is its own transpose."""
        return self._columns(name, r)

    def _sums(self, name: str, columns: Tensor) -> Params:  # noqa: ARG002
        """Return sums over rows: of σ and σ², and of z²."""
        sigma, z = self._sigma(name), self._z(name)
        moments = torch.stack([sigma.sum(), sigma.square().sum()])
        return {f"{name}/moments": moments, f"{name}/squares": z.square().sum()}

    def _sigma(self, name: str) -> Tensor:
        """Return σ at a point, ``(n,)``."""
        if name not in self._points:
            raise SplitError([f"NormedMaps need the stream's value at {name}: use them with ParallelPull"])
        x = widened(self._points[name]).flatten(0, -2)
        x = x - x.mean(-1, keepdim=True) if self.centred else x
        return x.square().mean(-1).sqrt()

    def _z(self, name: str) -> Tensor:
        """Return z at a point, ``(n,)``; zeros before there are moments.

        The deviation of s / σ from 1 is used, not s / σ itself: e and e s / σ are nearly the same column where σ varies
        little, and the delta rule learns their difference slowly. Divided by c, it learns as fast as J does.
        """
        sigma = self._sigma(name)
        if f"{name}/moments" not in self._maps:
            return torch.zeros_like(sigma)
        tiny = torch.finfo(sigma.dtype).tiny
        mean, square = self._held(f"{name}/moments", sigma).to(sigma.dtype).clamp_min(tiny).unbind()
        spread = ((square / mean / mean - 1).clamp_min(0) + _FLOOR**2).sqrt()
        return ((mean / sigma.clamp_min(tiny) - 1) / spread).clamp(-self.bound, self.bound)

    def _moved_moments(self, name: str, found: Tensor) -> Tensor:
        """Return the change of the moments: the first ones, or a step towards those of this batch."""
        if f"{name}/moments" not in self._maps:
            return found
        return _PACE * (found - self._held(f"{name}/moments", found))
