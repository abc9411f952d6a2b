"""The laws a tangent v is drawn from; all satisfy E[v vᵀ] = I up to a known diagonal."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from splitfg.tangents._layout import Layout


class TangentLaw(ABC):
    """A law for random directions in the space of a :class:`Layout`.

    Row k of a draw depends on the generator's state and on k alone, never on how many rows were asked for
    at once, unless the law is ``joint``: then the K tangents depend on each other and are drawn together.
    """

    @property
    def joint(self) -> bool:
        """Whether the K tangents of an estimate must be drawn in one go."""
        return False

    @abstractmethod
    def draw(self, layout: Layout, count: int, generator: torch.Generator) -> Tensor:
        """Draw tangents.

        Args:
            layout: The space.
            count: How many.
            generator: The only source of randomness; on the layout's device.

        Returns:
            Shape ``(count, P)``, one tangent a row.
        """

    @abstractmethod
    def precision(self, layout: Layout) -> Tensor | None:
        """The diagonal of E[v vᵀ]⁻¹, shape ``(P,)``, that keeps mean(d_k v_k) unbiased; ``None`` for ones."""


@dataclass(frozen=True)
class Gaussian(TangentLaw):
    """v ~ N(0, I), the paper's law: Var[ĝ_i] = (‖g‖² + g_i²) / K."""

    def draw(self, layout: Layout, count: int, generator: torch.Generator) -> Tensor:
        """Standard normal coordinates."""
        rows = torch.empty(count, layout.total, dtype=layout.dtype, device=layout.device)
        for row in rows:
            row.normal_(generator=generator)
        return rows

    def precision(self, layout: Layout) -> None:  # noqa: ARG002
        """Ones."""
        return


@dataclass(frozen=True)
class Rademacher(TangentLaw):
    """v_i = ±1 with equal odds: Var[ĝ_i] = (‖g‖² - g_i²) / K, the least for independent coordinates."""

    def draw(self, layout: Layout, count: int, generator: torch.Generator) -> Tensor:
        """Random signs."""
        rows = torch.empty(count, layout.total, dtype=layout.dtype, device=layout.device)
        for row in rows:
            row.random_(0, 2, generator=generator)
        return rows.mul_(2).sub_(1)

    def precision(self, layout: Layout) -> None:  # noqa: ARG002
        """Ones."""
        return


@dataclass(frozen=True)
class Orthogonal(TangentLaw):
    """K mutually orthogonal tangents of length sqrt(P), uniformly oriented.

    The rows of V are sqrt(P) times an orthonormal K-frame drawn from the Haar measure, so E[v_k v_kᵀ] = I and
    mean(d_k v_k) = (P / K) times the projection of g onto their span: unbiased, with total variance
    (P / K - 1) ‖g‖², zero at K = P.
    """

    @property
    def joint(self) -> bool:
        """Yes: each is orthogonal to all others."""
        return True

    def draw(self, layout: Layout, count: int, generator: torch.Generator) -> Tensor:
        """Orthonormalise Gaussian rows (their signs fixed by R's diagonal makes the frame Haar-distributed)."""
        if count > layout.total:
            raise ValueError(
                f"{count} orthogonal tangents do not exist in a space of {layout.total} parameters: lower K"
            )
        rows = Gaussian().draw(layout, count, generator)
        wide = rows.to(torch.float64 if layout.dtype == torch.float64 else torch.float32)
        q, r = torch.linalg.qr(wide.T)
        frame: Tensor = (q * torch.sign(torch.diagonal(r))).T
        return (frame * float(layout.total**0.5)).to(layout.dtype)

    def precision(self, layout: Layout) -> None:  # noqa: ARG002
        """Ones."""
        return
