"""Tangents with coordinates scaled by a running gradient magnitude, reweighted to stay unbiased."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from splitfg.errors import raise_if
from splitfg.numerics import wide, widened
from splitfg.tangents._laws import Gaussian, TangentLaw
from splitfg.tangents._layout import Layout
from splitfg.types import Params


class RunningMagnitude:
    """A running root-mean-square of gradient estimates, per parameter coordinate.

    m ← β m + (1 - β) ĝ²,    magnitude = sqrt(m / (1 - βᵗ)).

    Args:
        beta: Decay rate β.

    Raises:
        ValueError: If ``beta`` is outside [0, 1).

    Example:
        >>> import torch
        >>> import splitfg
        >>> from splitfg.tangents import Layout
        >>> magnitude, grads = splitfg.RunningMagnitude(), {"w": torch.tensor([3.0, -4.0])}
        >>> magnitude.update(grads)
        >>> magnitude.of(Layout.of(grads))
        tensor([3., 4.])
    """

    def __init__(self, beta: float = 0.99) -> None:
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"beta must be in [0, 1), got {beta}")
        self.beta = beta
        self._mean_square: Params = {}
        self._updates: Tensor | None = None

    def update(self, grads: Params) -> None:
        """Update with one estimate, in place: a captured step keeps using the same memory."""
        if self._updates is None:
            self._mean_square = {name: torch.zeros_like(g, dtype=wide(g.dtype)) for name, g in grads.items()}
            self._updates = next(iter(grads.values())).new_zeros((), dtype=torch.float64)
        for name, g in grads.items():
            self._mean_square[name].lerp_(widened(g).square(), 1 - self.beta)
        self._updates += 1

    def of(self, layout: Layout) -> Tensor | None:
        """Return the magnitudes as a flat vector ``(P,)``; ``None`` before the first update."""
        if self._updates is None:
            return None
        if self._updates.device != layout.device:  # checkpoints are loaded to the CPU
            self._updates = self._updates.to(layout.device)
            self._mean_square = {name: m.to(layout.device) for name, m in self._mean_square.items()}
        correction = 1 - self.beta**self._updates
        return (layout.flatten(self._mean_square) / correction).sqrt().to(layout.dtype)

    def state_dict(self) -> dict[str, object]:
        """Return the state to resume from."""
        updates = 0 if self._updates is None else int(self._updates)
        return {"mean_square": dict(self._mean_square), "updates": updates}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Resume from a :meth:`state_dict`."""
        saved: Params = dict(state["mean_square"])  # type: ignore[call-overload]
        self._mean_square = {name: m.clone() for name, m in saved.items()}
        updates = int(state["updates"])  # type: ignore[call-overload]
        first = next(iter(self._mean_square.values()), torch.empty(0))
        self._updates = first.new_tensor(updates, dtype=torch.float64) if updates else None


@dataclass(frozen=True)
class Conditioned(TangentLaw):
    """v = s ⊙ z with z ~ N(0, I), combined as d · v / s², which keeps the estimate unbiased.

    E[d v_i / s_i²] = E[(Σ_j g_j s_j z_j) z_i] / s_i = g_i,
    Var = ((Σ_j g_j² s_j²) / s_i² + g_i²) / K.

    s is the running magnitude, kept above ``floor``, to the power ``power``, and scaled to mean square one.
    ``power=1`` is the paper's proposal. By the Cauchy-Schwarz inequality, ``power=-0.5`` minimises the total variance
    (Σ 1/s_i²)(Σ g_j² s_j²): coordinates with larger gradients need *smaller* perturbations.

    Args:
        magnitude: The running magnitude; the training step updates it, the law only reads it.
        power: Exponent of the magnitude.
        floor: Smallest magnitude, relative to the root mean square.

    Raises:
        SplitError: If ``floor`` is not positive.

    Example:
        >>> import splitfg
        >>> law = splitfg.Conditioned(splitfg.RunningMagnitude(), power=-0.5)
        >>> estimator = splitfg.SplitFG(K=8, law=law)
    """

    magnitude: RunningMagnitude
    power: float = 1.0
    floor: float = 0.1

    def __post_init__(self) -> None:
        raise_if([] if self.floor > 0 else [f"floor must be positive, got {self.floor}"])

    def draw(self, layout: Layout, count: int, generator: torch.Generator) -> Tensor:
        """Draw Gaussian rows and scale their coordinates by s."""
        rows = Gaussian().draw(layout, count, generator)
        scale = self.scale(layout)
        return rows if scale is None else rows * scale

    def precision(self, layout: Layout) -> Tensor | None:
        """Return 1 / s²."""
        scale = self.scale(layout)
        return None if scale is None else scale.square().reciprocal()

    def scale(self, layout: Layout) -> Tensor | None:
        """Return s, shape ``(P,)``; ``None`` (ones) before the magnitude's first update."""
        magnitude = self.magnitude.of(layout)
        if magnitude is None:
            return None
        tiny = torch.finfo(layout.dtype).tiny
        relative = magnitude / magnitude.square().mean().sqrt().clamp_min(tiny)
        scale = relative.clamp_min(self.floor).pow(self.power)
        return scale / scale.square().mean().sqrt()
