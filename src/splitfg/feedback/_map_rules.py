"""Rules by which linear maps learn from perturbations and the responses to them."""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from splitfg.errors import raise_if


class MapRule(ABC):
    """A rule by which maps learn from perturbations and the responses to them.

    Maps M are ``(groups, out, in)``, perturbations e ``(groups, n, in)`` and responses ``(groups, n, out)``. The
    response to a row e is M e, exactly or in the mean over rows.
    """

    learns: ClassVar[bool] = True
    """Whether measurements change the maps; without that only the first is taken, which makes them."""

    @abstractmethod
    def initial(self, name: str, groups: int, outputs: int, inputs: int, like: Tensor) -> Tensor:
        """Return the maps before any update.

        Args:
            name: Names the map.
            groups: Independent maps that learn side by side.
            outputs: Rows of a map.
            inputs: Columns of a map.
            like: Decides dtype and device.
        """

    @abstractmethod
    def change(self, maps: Tensor, e: Tensor, response: Tensor) -> Tensor:
        """Return the change of the maps that one measurement asks for."""


class _StartsAtZero(MapRule):
    def initial(self, name: str, groups: int, outputs: int, inputs: int, like: Tensor) -> Tensor:  # noqa: ARG002
        """Return zeros."""
        return like.new_zeros(groups, outputs, inputs)


@dataclass(frozen=True)
class Proximal(_StartsAtZero):
    """A regularised least-squares step towards the maps that explain the present measurement.

    With the rows of E and of the responses T, and the unexplained rest R = T - E Mᵀ,

        Mᵀ ← Mᵀ + rate (EᵀE + ridge τ I)⁻¹ Eᵀ R,    τ = tr(EᵀE) / d.

    The error of the maps is multiplied by I - rate (EᵀE + ridge τ I)⁻¹ EᵀE, whose eigenvalues lie in [1 - rate, 1]: it
    never grows, whatever the rows, the scale and the correlation of E. With exact responses the maps converge at a
    constant rate; with noisy ones a smaller rate averages over about 1 / rate measurements.

    Args:
        rate: Step towards the least-squares solution, in (0, 1].
        ridge: Weight of the present maps against one measurement.

    Example:
        >>> import torch
        >>> from splitfg.feedback import Proximal
        >>> rule, jacobian = Proximal(), torch.tensor([[[2.0, -1.0]]])
        >>> e = torch.randn(1, 32, 2, generator=torch.Generator().manual_seed(0))
        >>> maps = rule.initial("layer", 1, 1, 2, e)
        >>> for _ in range(40):
        ...     maps = maps + rule.change(maps, e, e @ jacobian.mT)
        >>> torch.allclose(maps, jacobian, atol=1e-4)
        True
    """

    rate: float = 1.0
    ridge: float = 1.0

    def __post_init__(self) -> None:
        raise_if(rate_problems(self.rate) + ([] if self.ridge > 0 else [f"ridge must be positive, got {self.ridge}"]))

    def change(self, maps: Tensor, e: Tensor, response: Tensor) -> Tensor:
        """Return the step; solves in the smaller of rows and inputs."""
        rest = response - e @ maps.mT
        wide = e.shape[-2] < e.shape[-1]
        gram = e @ e.mT if wide else e.mT @ e
        diagonal = gram.diagonal(dim1=-2, dim2=-1)
        tiny = torch.finfo(e.dtype).tiny
        diagonal += self.ridge * diagonal.mean(-1, keepdim=True) + tiny
        solved = e.mT @ _solve(gram, rest) if wide else _solve(gram, e.mT @ rest)
        return self.rate * solved.mT


@dataclass(frozen=True)
class DeltaRule(_StartsAtZero):
    """M ← M + rate / (n + d) · Rᵀ E with the rest R = T - E Mᵀ: no solve, for white perturbations.

    White noise multiplies the expected squared error of the maps by about 1 - (2 rate - rate²) n / (n + d): with rate 1
    by d / (n + d), as a :class:`Proximal` step does, at the price of two products. Correlated perturbations can make it
    diverge, so give it white ones, as of :class:`LayerDifference`.

    Args:
        rate: How far a step moves the maps.

    Example:
        >>> import torch
        >>> from splitfg.feedback import DeltaRule
        >>> rule, jacobian = DeltaRule(rate=1.0), torch.eye(3)[None]
        >>> e = 3**0.5 * torch.eye(3)[None]  # white: three rows, each moves one input
        >>> rule.change(torch.zeros(1, 3, 3), e, e @ jacobian.mT)[0].diagonal()  # halfway: 3 rows, 3 inputs
        tensor([0.5000, 0.5000, 0.5000])
    """

    rate: float = 0.1

    def __post_init__(self) -> None:
        raise_if(rate_problems(self.rate))

    def change(self, maps: Tensor, e: Tensor, response: Tensor) -> Tensor:
        """Return the step."""
        return self.from_rest(torch.baddbmm(response, e, maps.mT, alpha=-1), e)

    def from_rest(self, rest: Tensor, e: Tensor) -> Tensor:
        """Return the step for a known rest R."""
        return (rest.mT @ e).mul_(self.step(e.shape[-2], e.shape[-1], e))

    def step(self, rows: int, inputs: int, e: Tensor) -> Tensor:
        """Return the factor of Rᵀ E, for noise of any scale."""
        mean_square = torch.linalg.vector_norm(e).square() / e.numel()
        factor: Tensor = (self.rate / (rows + inputs)) / mean_square.clamp_min(torch.finfo(e.dtype).tiny)
        return factor


@dataclass(frozen=True)
class ForwardDFA(_StartsAtZero):
    """M ← (1 - rate) M + rate · Tᵀ E / n: the running mean of Bacho and Chu's FDFA, a baseline.

    It does not subtract the response that the maps predict, so the noise of all other sites stays in the estimate.

    Args:
        rate: Weight of one measurement, in (0, 1].

    Example:
        >>> import torch
        >>> from splitfg.feedback import ForwardDFA
        >>> maps, e = torch.ones(1, 1, 2), torch.tensor([[[1.0, 1.0], [1.0, -1.0]]])
        >>> ForwardDFA(rate=0.5).change(maps, e, e @ torch.tensor([[[3.0], [1.0]]]))  # halfway to (3, 1)
        tensor([[[1., 0.]]])
    """

    rate: float = 0.1

    def __post_init__(self) -> None:
        raise_if(rate_problems(self.rate))

    def change(self, maps: Tensor, e: Tensor, response: Tensor) -> Tensor:
        """Return the step."""
        scale = e.square().mean().clamp_min(torch.finfo(e.dtype).tiny)
        return self.rate * (response.mT @ e / (e.shape[-2] * scale) - maps)


@dataclass(frozen=True)
class FixedMaps(MapRule):
    """Maps that stay as they were drawn, entries from N(0, 1 / out): feedback alignment, a baseline.

    Args:
        seed: Of the maps.

    Example:
        >>> import torch
        >>> from splitfg.feedback import FixedMaps
        >>> rule, e = FixedMaps(seed=1), torch.randn(1, 32, 4)
        >>> maps = rule.initial("layer", 1, 3, 4, e)
        >>> rule.change(maps, e, torch.randn(1, 32, 3)).any()
        tensor(False)
    """

    learns: ClassVar[bool] = False
    seed: int = 0

    def initial(self, name: str, groups: int, outputs: int, inputs: int, like: Tensor) -> Tensor:
        """Draw the maps, by their name."""
        generator = torch.Generator().manual_seed(self.seed + zlib.crc32(name.encode()))
        drawn = torch.randn(groups, outputs, inputs, generator=generator)
        return (drawn / math.sqrt(outputs)).to(like)

    def change(self, maps: Tensor, e: Tensor, response: Tensor) -> Tensor:  # noqa: ARG002
        """Return zeros."""
        return torch.zeros_like(maps)


@dataclass(frozen=True)
class AlignedMaps(FixedMaps):
    """Random maps turned towards the measured Jacobian by its cosine: GrAPE's alignment without backprop anchors.

    One step along the gradient of cos(M, G) with the one-sample estimate G = Tᵀ E / n; lengths stay as drawn.
    A baseline, after Caillon, Fagnou, Delattre and Allauzen (ICLR 2026).

    Args:
        seed: Of the initial maps.
        rate: Step along the cosine's gradient, relative to the maps' length.

    Example:
        >>> import torch
        >>> from splitfg.feedback import AlignedMaps
        >>> maps, e = torch.tensor([[[0.0, 2.0]]]), torch.eye(2)[None]
        >>> turned = maps + AlignedMaps(rate=0.1).change(maps, e, e @ torch.tensor([[[5.0], [0.0]]]))
        >>> turned, round(float(turned.norm()), 3)  # turned towards (5, 0), as long as before
        (tensor([[[0.1990, 1.9901]]]), 2.0)
    """

    learns: ClassVar[bool] = True
    rate: float = 0.1

    def __post_init__(self) -> None:
        raise_if(rate_problems(self.rate))

    def change(self, maps: Tensor, e: Tensor, response: Tensor) -> Tensor:
        """Return the step."""
        return self.turned(maps, response.mT @ e)

    def turned(self, maps: Tensor, measured: Tensor) -> Tensor:
        """Return the step towards measured Jacobians, shape ``(groups, n, m)`` as the maps."""
        tiny = torch.finfo(measured.dtype).tiny
        length = maps.flatten(1).norm(dim=1).clamp_min(tiny)[:, None, None]
        toward = measured / measured.flatten(1).norm(dim=1).clamp_min(tiny)[:, None, None]
        own = maps / length
        turned = own + self.rate * (toward - (own * toward).sum((-2, -1), keepdim=True) * own)
        unit: Tensor = turned / turned.flatten(1).norm(dim=1).clamp_min(tiny)[:, None, None]
        step: Tensor = length * unit - maps
        return step


_DOUBLINGS = 9
"""Terms of the series are 2 to this power: enough for condition numbers up to about 100."""


def _solve(matrix: Tensor, right: Tensor) -> Tensor:
    """Solve ``matrix @ x = right`` for positive definite matrices ``(groups, n, n)``."""
    if matrix.is_cuda:
        return _solve_by_products(matrix, right)
    return torch.cholesky_solve(right, torch.linalg.cholesky(matrix))


def _solve_by_products(matrix: Tensor, right: Tensor) -> Tensor:
    """Solve by matrix products alone, which GPUs are much faster at than at factorising small matrices.

    With s ≥ λmax and E = I - A / s, A⁻¹ = (I + E + E² + ...) / s; k doublings sum 2ᵏ terms. The eigenvalues of the
    result times A are 1 - (1 - λ / s)^(2ᵏ), in [0, 1]: a series cut short takes a smaller step, never a longer one.
    """
    largest = matrix.abs().sum(-1).amax(-1)[:, None, None]  # a norm, so no eigenvalue is larger
    power = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device) - matrix / largest
    solved = right / largest
    for _ in range(_DOUBLINGS - 1):
        solved = solved + power @ solved
        power = power @ power
    return solved + power @ solved


def rate_problems(rate: float) -> list[str]:
    """List the problems of the rate of maps."""
    return [] if 0 < rate <= 1 else [f"rate must be in (0, 1], got {rate}"]
