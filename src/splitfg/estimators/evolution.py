"""Antithetic evolution strategies: the forward gradient from two evaluations instead of a JVP."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from splitfg.engines import CentralDifference
from splitfg.errors import raise_if
from splitfg.estimators._settings import DrawsByLaw, micro_batch_problems, tangent_problems
from splitfg.estimators.forward_gradient import ForwardGradient
from splitfg.estimators.partial import Partial, PartNeeds, Share
from splitfg.splitting import Split
from splitfg.tangents import Gaussian, TangentLaw
from splitfg.types import Estimate, Inputs, Params, Target


@dataclass(frozen=True)
class EvolutionStrategy(DrawsByLaw):
    """Antithetic ES over all parameters, with K pairs of evaluations.

        ĝ = (1/K) Σ_k (L(θ + σ v_k) - L(θ - σ v_k)) / (2σ) · v_k.

    Unbiased for the gradient of the loss smoothed by N(0, σ² I), and so biased by O(σ²) for L itself.

    Args:
        K: Antithetic pairs per estimate.
        sigma: σ, the size of the perturbations.
        law: Distribution of the directions.
        micro_batch: Rows of the batch that pass the trunk together; ``None`` for all. The estimate is the same.

    Raises:
        SplitError: If a setting is out of range, and in every call if network or batch do not fit.

    Example:
        >>> import torch
        >>> from splitfg import EvolutionStrategy
        >>> from splitfg.testing import example_split
        >>> split, x, y = example_split()
        >>> estimate = EvolutionStrategy(K=4, sigma=1e-3)(split, x, y, generator=torch.Generator().manual_seed(0))
        >>> estimate.stats.biased
        True
    """

    K: int = 8
    sigma: float = 1e-3
    law: TangentLaw = field(default_factory=Gaussian)
    micro_batch: int | None = None
    _over_all: ForwardGradient = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        found = tangent_problems(self.K) + micro_batch_problems(self.micro_batch)
        if not self.sigma > 0:
            found.append(f"sigma must be positive, got {self.sigma}")
        raise_if(found)
        engine = CentralDifference(step=self.sigma)
        # here and not in every call: torch 2.11 compiles no call that constructs it
        over_all = ForwardGradient(self.K, self.law, engine, micro_batch=self.micro_batch)
        object.__setattr__(self, "_over_all", over_all)

    def __call__(self, split: Split, x: Inputs, y: Target, *, generator: torch.Generator) -> Estimate:
        """Estimate the gradient; see :class:`~splitfg.estimators.protocol.Estimator`."""
        return self._over_all(split, x, y, generator=generator)

    @property
    def needs(self) -> PartNeeds:
        """Requirements of a part of the estimate; see :class:`~splitfg.estimators.PartialEstimator`."""
        return PartNeeds(scores=self.K)

    def part(self, split: Split, x: Inputs, y: Target, *, generator: torch.Generator, share: Share) -> Partial:
        """Compute scores; see :class:`~splitfg.estimators.PartialEstimator`."""
        return self._over_all.part(split, x, y, generator=generator, share=share)

    def from_scores(self, split: Split, scores: Tensor, *, generator: torch.Generator) -> Params:
        """Combine scores and directions; see :func:`splitfg.distributed.gradient_from_scores`."""
        return self._over_all.from_scores(split, scores, generator=generator)
