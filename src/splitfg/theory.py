"""The paper's variance identities and convergence bounds, as functions.

g is the exact gradient at a fixed iterate and batch; K the number of tangents; P the number of trunk parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GAUSSIAN_FOURTH_MOMENT = 3.0
RADEMACHER_FOURTH_MOMENT = 1.0


def coordinate_variance(g: Tensor, K: int, fourth_moment: float = GAUSSIAN_FOURTH_MOMENT) -> Tensor:
    """Var[ĝ_i] of mean(d_k v_k) for each coordinate of the flat gradient g over all perturbed parameters.

    For independent coordinates with E[v²] = 1 and E[v⁴] = μ₄:

        Var[ĝ_i] = (‖g‖² + (μ₄ - 2) g_i²) / K,

    which is (‖g‖² + g_i²) / K for Gaussian and (‖g‖² - g_i²) / K for Rademacher tangents.
    """
    return (g.square().sum() + (fourth_moment - 2) * g.square()) / K


def total_variance(g: Tensor, K: int, fourth_moment: float = GAUSSIAN_FOURTH_MOMENT) -> Tensor:
    """E‖ĝ - g‖² = (P + μ₄ - 2) ‖g‖² / K: (P + 1) ‖g‖² / K for Gaussian tangents."""
    return (g.numel() + fourth_moment - 2) * g.square().sum() / K


def orthogonal_total_variance(g: Tensor, K: int) -> Tensor:
    """E‖ĝ - g‖² = (P/K - 1) ‖g‖² for K mutually orthogonal tangents of length sqrt(P)."""
    return (g.numel() / K - 1) * g.square().sum()


def conditioned_coordinate_variance(g: Tensor, scale: Tensor, K: int) -> Tensor:
    """Var[ĝ_i] = ((Σ_j g_j² s_j²) / s_i² + g_i²) / K for tangents s ⊙ z put back as d v / s²."""
    return ((g * scale).square().sum() / scale.square() + g.square()) / K


def energy_ratio(g_trunk: Tensor, g_head: Tensor) -> Tensor:
    """‖g_trunk‖² / ‖g‖²: how far the split lowers each trunk coordinate's variance, to leading order."""
    trunk = g_trunk.square().sum()
    return trunk / (trunk + g_head.square().sum())


def variance_reduction(g_trunk: Tensor, g_head: Tensor) -> tuple[Tensor, Tensor]:
    """By what factor the split lowers the variance of pure forward gradient: per coordinate, and in total.

    Per coordinate ‖g‖² / ‖g_trunk‖²; in total ((P_total + 1) ‖g‖²) / ((P_trunk + 1) ‖g_trunk‖²).
    """
    per_coordinate = 1 / energy_ratio(g_trunk, g_head)
    counts = (g_trunk.numel() + g_head.numel() + 1) / (g_trunk.numel() + 1)
    return per_coordinate, per_coordinate * counts


def second_moment(g_trunk: Tensor, g_head: Tensor, K: int) -> Tensor:
    """E‖ĝ‖² = ‖g_head‖² + (1 + (P + 1)/K) ‖g_trunk‖²."""
    return g_head.square().sum() + (1 + (g_trunk.numel() + 1) / K) * g_trunk.square().sum()


def weighted_second_moment(g_trunk: Tensor, g_head: Tensor, a_trunk: Tensor, a_head: Tensor, K: int) -> Tensor:
    """E‖A ĝ‖² for a diagonal preconditioner A that is fixed before the tangents are drawn.

    ‖A g_head‖² + Σ_{i in trunk} a_i² ((1 + 1/K) g_i² + ‖g_trunk‖² / K).
    """
    trunk = a_trunk.square() * ((1 + 1 / K) * g_trunk.square() + g_trunk.square().sum() / K)
    return (a_head * g_head).square().sum() + trunk.sum()


def noise_ratio(g_trunk: Tensor, g_head: Tensor, a_trunk: Tensor, a_head: Tensor, K: int) -> Tensor:
    """R(A) = E‖A ĝ‖² / <g, A g>, zero where the gradient vanishes."""
    signal = (a_trunk * g_trunk.square()).sum() + (a_head * g_head.square()).sum()
    moment = weighted_second_moment(g_trunk, g_head, a_trunk, a_head, K)
    return torch.where(signal > 0, moment / signal, torch.zeros_like(signal))


def r_max(P: int, K: int, *, a_min: float = 1.0, a_max: float = 1.0) -> float:
    """The worst case of the noise ratio: (a_max² / a_min) (1 + (P + 1)/K)."""
    return a_max**2 / a_min * (1 + (P + 1) / K)


def preconditioned_step_bound(L: float, r: float) -> float:
    """The largest step the theorem covers for an L-smooth objective: η <= 1 / (L R_max)."""
    return 1 / (L * r)


def sgd_step_bound(L: float, P: int, K: int) -> float:
    """The largest plain step covered: η <= 1 / (L (1 + (P + 1)/K))."""
    return 1 / (L * (1 + (P + 1) / K))


def preconditioned_convergence_bound(gap: float, eta: float, T: int, *, a_min: float | None = None) -> float:
    """Upper bound on (1/T) Σ_t E<∇F, A_t ∇F>: 2 (F₀ - F*) / (η T); with ``a_min``, on (1/T) Σ_t E‖∇F‖²."""
    return 2 * gap / (eta * T * (1.0 if a_min is None else a_min))


def sgd_convergence_bound(gap: float, eta: float, T: int, *, L: float = 0.0, data_variance: float = 0.0) -> float:
    """Upper bound on (1/T) Σ_t E‖∇F‖²: 2 (F₀ - F*) / (η T), plus L η σ² with minibatches of variance σ²."""
    return 2 * gap / (eta * T) + L * eta * data_variance


def probes_per_parameter(steps: int, K: int, P: int) -> float:
    """How many scalar probes each trunk parameter gets in a budget: steps · K / P."""
    return steps * K / P


@dataclass(frozen=True)
class TransformerSize:
    """A transformer and a batch, for what activations weigh: 16 · width bytes a token and layer in half precision.

    The paper's example, 32 layers of width 4096 at sequence 4096 and batch 8, keeps 69 GB for a backward pass.
    """

    depth: int
    width: int
    sequence: int
    batch: int
    bytes_per_unit: int = 16

    @property
    def layer_bytes(self) -> int:
        """One layer's activations."""
        return self.bytes_per_unit * self.width * self.sequence * self.batch

    @property
    def backprop_bytes(self) -> int:
        """What reverse mode keeps: every layer's activations."""
        return self.depth * self.layer_bytes

    def split_fg_bytes(self, chunk: int = 1) -> int:
        """What forward mode holds at once: one layer's activations and ``chunk`` tangents of them, at any depth."""
        return (1 + chunk) * self.layer_bytes
