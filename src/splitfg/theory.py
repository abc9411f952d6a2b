"""The paper's variance identities and convergence bounds, as functions.

Notation: g is the exact gradient at a fixed iterate and batch, ĝ its estimate, K the number of tangents, P the number
of trunk parameters, A a diagonal preconditioner, F an L-smooth objective.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GAUSSIAN_FOURTH_MOMENT = 3.0
RADEMACHER_FOURTH_MOMENT = 1.0


def coordinate_variance(g: Tensor, K: int, fourth_moment: float = GAUSSIAN_FOURTH_MOMENT) -> Tensor:
    """Compute Var[ĝ_i] of ĝ = mean_k(d_k v_k) for every coordinate.

    For independent coordinates with E[v²] = 1 and E[v⁴] = μ₄:

        Var[ĝ_i] = (‖g‖² + (μ₄ - 2) g_i²) / K,

    which is (‖g‖² + g_i²) / K for Gaussian and (‖g‖² - g_i²) / K for Rademacher tangents.

    Args:
        g: Flat gradient over all perturbed parameters, shape ``(P,)``.
        K: Number of tangents.
        fourth_moment: μ₄ of a tangent's coordinate.

    Returns:
        Variances, shape ``(P,)``.

    Example:
        >>> import torch
        >>> from splitfg.theory import coordinate_variance, RADEMACHER_FOURTH_MOMENT
        >>> coordinate_variance(torch.tensor([3.0, 4.0]), K=1)
        tensor([34., 41.])
        >>> coordinate_variance(torch.tensor([3.0, 4.0]), K=1, fourth_moment=RADEMACHER_FOURTH_MOMENT)
        tensor([16.,  9.])
    """
    return (g.square().sum() + (fourth_moment - 2) * g.square()) / K


def total_variance(g: Tensor, K: int, fourth_moment: float = GAUSSIAN_FOURTH_MOMENT) -> Tensor:
    """Compute E‖ĝ - g‖² = (P + μ₄ - 2) ‖g‖² / K, which is (P + 1) ‖g‖² / K for Gaussian tangents.

    Args:
        g: Flat gradient over all perturbed parameters, shape ``(P,)``.
        K: Number of tangents.
        fourth_moment: μ₄ of a tangent's coordinate.

    Example:
        >>> import torch
        >>> from splitfg.theory import total_variance
        >>> total_variance(torch.tensor([3.0, 4.0]), K=1).item()
        75.0
    """
    return (g.numel() + fourth_moment - 2) * g.square().sum() / K


def orthogonal_total_variance(g: Tensor, K: int) -> Tensor:
    """Compute E‖ĝ - g‖² = (P/K - 1) ‖g‖² for K mutually orthogonal tangents of length sqrt(P).

    Example:
        >>> import torch
        >>> from splitfg.theory import orthogonal_total_variance
        >>> [orthogonal_total_variance(torch.tensor([3.0, 4.0]), K).item() for K in (1, 2)]
        [25.0, 0.0]
    """
    return (g.numel() / K - 1) * g.square().sum()


def conditioned_coordinate_variance(g: Tensor, scale: Tensor, K: int) -> Tensor:
    """Compute the coordinate variances of tangents v = s ⊙ z combined as d v / s², with z Gaussian.

        Var[ĝ_i] = ((Σ_j g_j² s_j²) / s_i² + g_i²) / K

    Args:
        g: Flat gradient, shape ``(P,)``.
        scale: s, shape ``(P,)``.
        K: Number of tangents.

    Returns:
        Variances, shape ``(P,)``.
    """
    return ((g * scale).square().sum() / scale.square() + g.square()) / K


def energy_ratio(g_trunk: Tensor, g_head: Tensor) -> Tensor:
    """Compute ‖g_trunk‖² / ‖g‖²: the trunk's share of the gradient's energy.

    To leading order the split multiplies the variance of every trunk coordinate by this ratio.

    Example:
        >>> import torch
        >>> from splitfg.theory import energy_ratio
        >>> energy_ratio(torch.tensor([3.0]), torch.tensor([4.0])).item()
        0.36...
    """
    trunk = g_trunk.square().sum()
    return trunk / (trunk + g_head.square().sum())


def variance_reduction(g_trunk: Tensor, g_head: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the factors by which the split lowers the variance of the pure forward gradient.

    Returns:
        Per coordinate, ‖g‖² / ‖g_trunk‖² (to leading order); in total,
        ((P_total + 1) ‖g‖²) / ((P_trunk + 1) ‖g_trunk‖²).
    """
    per_coordinate = 1 / energy_ratio(g_trunk, g_head)
    counts = (g_trunk.numel() + g_head.numel() + 1) / (g_trunk.numel() + 1)
    return per_coordinate, per_coordinate * counts


def second_moment(g_trunk: Tensor, g_head: Tensor, K: int) -> Tensor:
    """Compute E‖ĝ‖² = ‖g_head‖² + (1 + (P + 1)/K) ‖g_trunk‖² for Gaussian tangents."""
    return g_head.square().sum() + (1 + (g_trunk.numel() + 1) / K) * g_trunk.square().sum()


def weighted_second_moment(g_trunk: Tensor, g_head: Tensor, a_trunk: Tensor, a_head: Tensor, K: int) -> Tensor:
    """Compute E‖A ĝ‖² for a diagonal preconditioner A that does not depend on the tangents.

        E‖A ĝ‖² = ‖A g_head‖² + Σ_{i in trunk} a_i² ((1 + 1/K) g_i² + ‖g_trunk‖² / K)

    Args:
        g_trunk: Flat gradient of the trunk, shape ``(P,)``.
        g_head: Flat gradient of the head.
        a_trunk: The trunk's diagonal of A, shape ``(P,)``.
        a_head: The head's diagonal of A.
        K: Number of tangents.
    """
    trunk = a_trunk.square() * ((1 + 1 / K) * g_trunk.square() + g_trunk.square().sum() / K)
    return (a_head * g_head).square().sum() + trunk.sum()


def noise_ratio(g_trunk: Tensor, g_head: Tensor, a_trunk: Tensor, a_head: Tensor, K: int) -> Tensor:
    """Compute R(A) = E‖A ĝ‖² / <g, A g>, or zero if the gradient vanishes; see :func:`weighted_second_moment`."""
    signal = (a_trunk * g_trunk.square()).sum() + (a_head * g_head.square()).sum()
    moment = weighted_second_moment(g_trunk, g_head, a_trunk, a_head, K)
    return torch.where(signal > 0, moment / signal, torch.zeros_like(signal))


def r_max(P: int, K: int, *, a_min: float = 1.0, a_max: float = 1.0) -> float:
    """Compute the upper bound R_max = (a_max² / a_min) (1 + (P + 1)/K) of the noise ratio.

    Example:
        >>> from splitfg.theory import r_max
        >>> r_max(P=99, K=10)
        11.0
    """
    return a_max**2 / a_min * (1 + (P + 1) / K)


def preconditioned_step_bound(L: float, r: float) -> float:
    """Compute the largest learning rate that the theorem covers: η <= 1 / (L R_max).

    Example:
        >>> from splitfg.theory import preconditioned_step_bound, r_max
        >>> preconditioned_step_bound(L=2.0, r=r_max(P=99, K=10))
        0.045...
    """
    return 1 / (L * r)


def sgd_step_bound(L: float, P: int, K: int) -> float:
    """Compute the largest learning rate of plain SGD that the theorem covers: η <= 1 / (L (1 + (P + 1)/K)).

    Example:
        >>> from splitfg.theory import sgd_step_bound
        >>> sgd_step_bound(L=2.0, P=99, K=10)
        0.045...
    """
    return 1 / (L * (1 + (P + 1) / K))


def preconditioned_convergence_bound(gap: float, eta: float, T: int, *, a_min: float | None = None) -> float:
    """Bound (1/T) Σ_t E<∇F, A_t ∇F> from above by 2 (F₀ - F*) / (η T).

    Args:
        gap: F₀ - F*.
        eta: Learning rate η.
        T: Number of steps.
        a_min: Lower bound of the preconditioner; with it the result bounds (1/T) Σ_t E‖∇F‖².

    Example:
        >>> from splitfg.theory import preconditioned_convergence_bound
        >>> preconditioned_convergence_bound(gap=1.0, eta=0.1, T=100)
        0.2
    """
    return 2 * gap / (eta * T * (1.0 if a_min is None else a_min))


def sgd_convergence_bound(gap: float, eta: float, T: int, *, L: float = 0.0, data_variance: float = 0.0) -> float:
    """Bound (1/T) Σ_t E‖∇F‖² from above by 2 (F₀ - F*) / (η T) + L η σ².

    Args:
        gap: F₀ - F*.
        eta: Learning rate η.
        T: Number of steps.
        L: Smoothness constant; needed with minibatches only.
        data_variance: σ², what minibatches add to E‖ĝ‖²: (1 + (P + 1)/K) times the variance of a minibatch's gradient
            is enough. Zero for the full batch.

    Example:
        >>> from splitfg.theory import sgd_convergence_bound
        >>> sgd_convergence_bound(gap=1.0, eta=0.1, T=100)
        0.2
    """
    return 2 * gap / (eta * T) + L * eta * data_variance


def probes_per_parameter(steps: int, K: int, P: int) -> float:
    """Compute the number of scalar probes per trunk parameter in a training budget: steps · K / P.

    Example:
        >>> from splitfg.theory import probes_per_parameter
        >>> probes_per_parameter(steps=1000, K=8, P=16_000)
        0.5
    """
    return steps * K / P


@dataclass(frozen=True)
class TransformerSize:
    """Size of a transformer and a batch, to estimate the memory of its activations.

    A layer stores ``bytes_per_unit * width`` bytes per token: 16 bytes per unit in half precision.

    Example:
        The paper's example stores 69 GB for a backward pass.

        >>> from splitfg.theory import TransformerSize
        >>> size = TransformerSize(depth=32, width=4096, sequence=4096, batch=8)
        >>> print(f"{size.backprop_bytes / 1e9:.1f} GB, {size.split_fg_bytes() / 1e9:.1f} GB")
        68.7 GB, 4.3 GB
    """

    depth: int
    width: int
    sequence: int
    batch: int
    bytes_per_unit: int = 16

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's activations."""
        return self.bytes_per_unit * self.width * self.sequence * self.batch

    @property
    def backprop_bytes(self) -> int:
        """Bytes that reverse mode stores: the activations of every layer."""
        return self.depth * self.layer_bytes

    def split_fg_bytes(self, chunk: int = 1) -> int:
        """Compute the peak of forward mode: one layer's activations and ``chunk`` tangents of them, at any depth."""
        return (1 + chunk) * self.layer_bytes
