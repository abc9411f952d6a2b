"""Learned maps that depend on the cluster of the stream's value."""

from __future__ import annotations

import copy
import zlib
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
"""How far a measurement moves the centres of clusters."""


class GatedMaps(ExtendedMaps):
    """A mean Jacobian for every cluster of the stream's value: δ_i = r (J_i + G_{i,c(x_i)})ᵀ.

    The Jacobian from a point of the stream to its top depends on the value there. With C clusters of
    x̂ = x / rms(x), found by k-means as training goes on, c(x) = argmin_c ‖x̂ - m_c‖², and unit noise e_i at all points,
    the delta rule of :class:`MeanJacobian` learns a shared map and one correction for every cluster,

        J_i     ← J_i     + rate / (n + 2 D) Σ over rows          of e_iᵀ rest,
        G_{i,c} ← G_{i,c} + rate / (n + 2 D) Σ over rows in c     of e_iᵀ rest,
        rest = dx - Σ_j e_j (J_j + G_{j,c_j}),    n rows, D noises a row.

    A correction sees the rows of its cluster only, so it follows C times more slowly. The first measurement places
    the centres at random around the mean of x̂. Biased by what varies inside a cluster.

    :class:`~splitfg.ParallelPull` and :class:`~splitfg.DirectPath` provide the stream's values; with the latter the
    trunk only runs forward.

    Args:
        rate: How far a step moves the maps.
        clusters: C.
        seed: Of the first centres.
        every: Measure at every n-th step only.

    Example:
        >>> import torch
        >>> import splitfg
        >>> from splitfg.feedback import GatedMaps
        >>> from splitfg.testing import example_split
        >>> split, x, y = example_split()
        >>> pull = splitfg.ParallelPull(feedback=GatedMaps(clusters=2))
        >>> estimate = pull(split, x, y, generator=torch.Generator().manual_seed(0))
        >>> pull.update_state(split, estimate)
    """

    further: ClassVar[str] = "gates"

    def __init__(self, rate: float = 0.15, *, clusters: int = 16, seed: int = 0, every: int = 1) -> None:
        found = rate_problems(rate)
        found += [] if clusters >= 2 else [f"clusters must be at least 2, got {clusters}: use MeanJacobian()"]
        raise_if(found)
        super().__init__(rate, every=every)
        self.clusters, self.seed = clusters, seed
        self._points: Mapping[str, Tensor] = {}

    @property
    def reads_stream(self) -> bool:
        """Return ``True``."""
        return True

    def seeing(self, points: Mapping[str, Tensor]) -> GatedMaps:
        """Return these maps, gated by the stream's values."""
        seen = copy.copy(self)  # shares the maps
        seen._points = points
        return seen

    def change(self, correlations: Params, *, rows: int, noises: int) -> Params:
        """Scale the correlations by rate / (n + 2 D), and move the centres."""
        scale = self.rate / (rows + 2 * noises)
        moved = Params()
        for name in [name for name in correlations if "/" not in name]:
            moved[name] = scale * correlations[name]
            moved[f"{name}/gates"] = scale * correlations[f"{name}/gates"]
            moved[f"{name}/centres"] = self._moved_centres(name, correlations, rows)
        return moved

    def _columns(self, name: str, e: Tensor) -> Tensor:
        """Return e in the columns of its cluster, and zeros in the others."""
        gate = self._gate(name, e).reshape(*e.shape[:-1], self.clusters)
        return (gate[..., :, None] * e[..., None, :]).flatten(-2)

    def _back(self, name: str, r: Tensor) -> Tensor:
        """Return the columns of r: a gate is its own transpose."""
        return self._columns(name, r)

    def _sums(self, name: str, columns: Tensor) -> Params:
        """Return sums over rows: of x̂ and counts by cluster, or of x̂ and x̂² before there are centres."""
        x = self._values(name)
        if f"{name}/centres" not in self._maps:
            return {f"{name}/sums": x.sum(0), f"{name}/squares": x.square().sum(0)}
        gate = self._gate(name, columns)
        return {f"{name}/sums": gate.T @ x, f"{name}/counts": gate.sum(0)}

    def _values(self, name: str) -> Tensor:
        """Return x̂ at a point, ``(n, d)``."""
        if name not in self._points:
            raise SplitError([f"GatedMaps need the stream's value at {name}: use them with ParallelPull or DirectPath"])
        x = widened(self._points[name]).flatten(0, -2)
        return x * x.square().mean(-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny).rsqrt()

    def _gate(self, name: str, like: Tensor) -> Tensor:
        """Return one-hot clusters ``(n, C)``; zeros before there are centres."""
        x = self._values(name)
        if f"{name}/centres" not in self._maps:
            return x.new_zeros(len(x), self.clusters).to(like.dtype)
        centres = self._held(f"{name}/centres", x)
        nearest = (x @ centres.T - centres.square().sum(-1) / 2).argmax(-1, keepdim=True)
        return torch.zeros(len(x), self.clusters, dtype=like.dtype, device=x.device).scatter_(1, nearest, 1.0)

    def _moved_centres(self, name: str, found: Params, rows: int) -> Tensor:
        """Return the change of the centres: the first ones, or a step of k-means."""
        sums = found[f"{name}/sums"]
        if f"{name}/counts" not in found:
            mean = sums / rows
            spread = (found[f"{name}/squares"] / rows - mean.square()).clamp_min(0).sqrt()
            generator = torch.Generator().manual_seed(self.seed + zlib.crc32(name.encode()))
            return mean + spread * torch.randn(self.clusters, len(mean), generator=generator).to(mean)
        counts = found[f"{name}/counts"][:, None]
        return _PACE * (sums - counts * self._held(f"{name}/centres", sums)) / (counts + rows / self.clusters)
