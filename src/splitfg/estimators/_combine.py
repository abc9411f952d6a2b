"""From K scores on K tangents to one gradient."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from splitfg.numerics import wide, without_autocast
from splitfg.tangents import TangentSource


class Accumulator(ABC):
    """Accumulates tangents and their scores chunk by chunk into one gradient."""

    @abstractmethod
    def add(self, tangents: Tensor, scores: Tensor) -> None:
        """Add ``(c, P)`` tangents and their ``(c,)`` scores."""

    @abstractmethod
    def result(self) -> Tensor:
        """Return the gradient, shape ``(P,)``."""


class Combination(ABC):
    """A way to combine K scored tangents."""

    @property
    @abstractmethod
    def biased(self) -> bool:
        """Whether the combined estimate is biased."""

    @property
    @abstractmethod
    def looks_back(self) -> bool:
        """Whether it needs tangents again after all scores are known."""

    @abstractmethod
    def start(self, source: TangentSource) -> Accumulator:
        """Begin one estimate."""


@dataclass(frozen=True)
class Mean(Combination):
    """ĝ = (1/K) Σ_k d_k v_k, the paper's: unbiased for every law (reweighted where E[v vᵀ] ≠ I).

    Example:
        >>> import torch
        >>> from splitfg import Mean, SplitFG
        >>> from splitfg.testing import example_split
        >>> split, x, y = example_split()
        >>> estimate = SplitFG(K=4, combine=Mean())(split, x, y, generator=torch.Generator().manual_seed(0))
        >>> estimate.stats.biased
        False
    """

    @property
    def biased(self) -> bool:
        """Return ``False``."""
        return False

    @property
    def looks_back(self) -> bool:
        """Return ``False``: tangents are dropped once they are scored."""
        return False

    def start(self, source: TangentSource) -> Accumulator:
        """Start a running sum of d_k v_k."""
        return _MeanAccumulator(source)


class _MeanAccumulator(Accumulator):
    def __init__(self, source: TangentSource) -> None:
        self._source = source
        self._sum: Tensor | None = None

    def add(self, tangents: Tensor, scores: Tensor) -> None:
        with without_autocast(tangents.device):
            if self._sum is None:
                self._sum = _weighted_sum(tangents, scores)
            elif self._sum.dtype == tangents.dtype:
                self._sum.addmv_(tangents.T, scores.to(tangents.dtype))
            else:
                self._sum.add_(_weighted_sum(tangents, scores))

    def result(self) -> Tensor:
        assert self._sum is not None
        mean = self._sum.div_(self._source.count).to(self._source.layout.dtype)
        precision = self._source.law.precision(self._source.layout)
        return mean if precision is None else mean.mul_(precision)


@dataclass(frozen=True)
class Projection(Combination):
    """ĝ = Vᵀ (V Vᵀ)⁻¹ d, the projection of g onto the span of the K tangents (rows of V).

    Biased towards zero (E[ĝ] = (K/P) g for Gaussian tangents) but with no noise inside the span: use it if
    you tune the step size anyway. It draws chunks of tangents twice instead of storing them.

    Example:
        >>> import torch
        >>> from splitfg import Projection, SplitFG
        >>> from splitfg.testing import example_split
        >>> split, x, y = example_split()
        >>> estimate = SplitFG(K=4, combine=Projection())(split, x, y, generator=torch.Generator().manual_seed(0))
        >>> estimate.stats.biased
        True
    """

    @property
    def biased(self) -> bool:
        """Return ``True``: the mean is shrunk by K/P."""
        return True

    @property
    def looks_back(self) -> bool:
        """Return ``True``: the Gram matrix needs pairs of tangents."""
        return True

    def start(self, source: TangentSource) -> Accumulator:
        """Start by storing scores; tangents are drawn again for the result."""
        return _ProjectionAccumulator(source)


class _ProjectionAccumulator(Accumulator):
    def __init__(self, source: TangentSource) -> None:
        self._source = source
        self._scores: list[Tensor] = []
        self._kept: Tensor | None = None

    def add(self, tangents: Tensor, scores: Tensor) -> None:
        self._scores.append(scores)
        if tangents.shape[0] == self._source.count:
            self._kept = tangents

    def result(self) -> Tensor:
        scores = torch.cat(self._scores)
        with without_autocast(scores.device):
            return self._projected(scores)

    def _projected(self, scores: Tensor) -> Tensor:
        dtype = self._source.layout.dtype
        weights = torch.linalg.pinv(self._gram(), hermitian=True) @ scores.to(wide(dtype))
        parts = weights.to(dtype).split(self._source.chunk_sizes)
        return torch.stack([w @ self._chunk(i) for i, w in enumerate(parts)]).sum(dim=0)

    def _gram(self) -> Tensor:
        count = len(self._source.chunk_sizes)
        rows = []
        for i in range(count):
            left = self._chunk(i)
            rows.append(torch.cat([left @ self._chunk(j).T for j in range(count)], dim=1))
        return torch.cat(rows).to(wide(left.dtype))

    def _chunk(self, index: int) -> Tensor:
        return self._kept if self._kept is not None else self._source.again(index)


def _weighted_sum(tangents: Tensor, scores: Tensor) -> Tensor:
    """Σ_k d_k v_k, in float32 or wider; for narrow tangents the scores, which may be large, are scaled to at most 1."""
    summed = wide(tangents.dtype)
    if summed == tangents.dtype:
        return scores.to(summed) @ tangents
    largest = scores.abs().amax().clamp_min(torch.finfo(scores.dtype).tiny)
    return largest * ((scores / largest).to(tangents.dtype) @ tangents).to(summed)
