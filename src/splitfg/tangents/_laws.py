"""Distributions of a tangent v; all satisfy E[v vᵀ] = I up to a known diagonal."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from splitfg.numerics import widened
from splitfg.tangents._layout import Layout


class TangentLaw(ABC):
    """A distribution of random directions in the space of a :class:`Layout`.

    Row k of a draw depends on the generator's state and on k alone, not on the number of rows drawn at once, unless
    the law is ``joint``: then the K tangents depend on each other and are drawn together.

    Example:
        A law of your own, uniform on [-√3, √3]:

        >>> import torch
        >>> import splitfg
        >>> class Uniform(splitfg.TangentLaw):
        ...     def draw(self, layout, count, generator):
        ...         rows = torch.empty(count, layout.total, dtype=layout.dtype, device=layout.device)
        ...         for row in rows:
        ...             row.uniform_(-(3**0.5), 3**0.5, generator=generator)
        ...         return rows
        ...     def precision(self, layout):
        ...         return None
        >>> estimator = splitfg.SplitFG(K=8, law=Uniform())
    """

    @property
    def joint(self) -> bool:
        """Whether the K tangents of an estimate must be drawn in a single call."""
        return False

    @abstractmethod
    def draw(self, layout: Layout, count: int, generator: torch.Generator) -> Tensor:
        """Draw tangents.

        Args:
            layout: The space.
            count: Number of tangents.
            generator: The only source of randomness; on the layout's device.

        Returns:
            Shape ``(count, P)``, one tangent per row.
        """

    @abstractmethod
    def precision(self, layout: Layout) -> Tensor | None:
        """Return the diagonal of E[v vᵀ]⁻¹, shape ``(P,)``; ``None`` for ones.

        The estimate mean(d_k v_k) times this diagonal is unbiased.
        """


@dataclass(frozen=True)
class Gaussian(TangentLaw):
    """v ~ N(0, I), the paper's law: unbiased, Var[ĝ_i] = (‖g‖² + g_i²) / K.

    Example:
        >>> import splitfg
        >>> estimator = splitfg.SplitFG(K=8, law=splitfg.Gaussian())
    """

    def draw(self, layout: Layout, count: int, generator: torch.Generator) -> Tensor:
        """Draw standard normal coordinates."""
        rows = torch.empty(count, layout.total, dtype=layout.dtype, device=layout.device)
        for row in rows:
            row.normal_(generator=generator)
        return rows

    def precision(self, layout: Layout) -> None:  # noqa: ARG002
        """Return ``None``: E[v vᵀ] = I."""
        return


@dataclass(frozen=True)
class Rademacher(TangentLaw):
    """v_i = ±1 with equal odds: unbiased, Var[ĝ_i] = (‖g‖² - g_i²) / K.

    No law with independent coordinates has a smaller variance.

    Example:
        >>> import splitfg
        >>> estimator = splitfg.SplitFG(K=8, law=splitfg.Rademacher())
    """

    def draw(self, layout: Layout, count: int, generator: torch.Generator) -> Tensor:
        """Draw random signs."""
        rows = torch.empty(count, layout.total, dtype=layout.dtype, device=layout.device)
        for row in rows:
            row.random_(0, 2, generator=generator)
        return rows.mul_(2).sub_(1)

    def precision(self, layout: Layout) -> None:  # noqa: ARG002
        """Return ``None``: E[v vᵀ] = I."""
        return


@dataclass(frozen=True)
class Orthogonal(TangentLaw):
    """K mutually orthogonal tangents of length sqrt(P), uniformly oriented.

    The rows of V are sqrt(P) times an orthonormal K-frame drawn from the Haar measure, so E[v_k v_kᵀ] = I and
    mean(d_k v_k) = (P / K) times the projection of g onto their span: unbiased, with total variance
    (P / K - 1) ‖g‖², zero at K = P.

    Example:
        >>> import splitfg
        >>> estimator = splitfg.SplitFG(K=8, law=splitfg.Orthogonal())
    """

    @property
    def joint(self) -> bool:
        """``True``: each tangent is orthogonal to all others."""
        return True

    def draw(self, layout: Layout, count: int, generator: torch.Generator) -> Tensor:
        """Orthonormalise Gaussian rows.

        Raises:
            ValueError: If ``count`` exceeds the number of parameters.
        """
        if count > layout.total:
            raise ValueError(
                f"{count} orthogonal tangents do not exist in a space of {layout.total} parameters: lower K"
            )
        rows = Gaussian().draw(layout, count, generator)
        q, r = torch.linalg.qr(widened(rows).T)
        # only with the signs of R's diagonal is the frame Haar-distributed
        frame: Tensor = (q * torch.sign(torch.diagonal(r))).T
        return (frame * float(layout.total**0.5)).to(layout.dtype)

    def precision(self, layout: Layout) -> None:  # noqa: ARG002
        """Return ``None``: E[v vᵀ] = I."""
        return
