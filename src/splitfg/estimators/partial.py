"""Estimates in parts: some rows of a batch and some of the tangents, computed by one of several processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from splitfg.estimators.protocol import Estimator
from splitfg.numerics import norm
from splitfg.splitting import Split
from splitfg.types import Estimate, Inputs, Params, Stats, Target


@dataclass(frozen=True)
class Share:
    """The part of an estimate that a process computes; all of it by default.

    Attributes:
        rows: Rows of this process.
        all_rows: Rows of all processes that hold different rows.
        part: Number of this process among those that hold the same rows and divide the tangents, from 0.
        parts: Count of those processes.
        inputs: Inputs of the first rows of all processes together, for estimators that ask for them.

    Example:
        >>> from splitfg.estimators import Share
        >>> [list(Share(part=part, parts=3).tangents(8)) for part in range(3)]
        [[0, 1], [2, 3, 4], [5, 6, 7]]
    """

    rows: int = 1
    all_rows: int = 1
    part: int = 0
    parts: int = 1
    inputs: Inputs | None = None

    @property
    def first(self) -> bool:
        """Whether this process adds the terms that do not depend on tangents; exactly one of ``parts`` does."""
        return self.part == 0

    def tangents(self, K: int) -> range:
        """Return the numbers of the tangents that this process pushes through the trunk."""
        return range(K * self.part // self.parts, K * (self.part + 1) // self.parts)

    def within(self, start: int, stop: int, K: int) -> slice:
        """Return the positions of this process's tangents in a chunk that holds tangents ``start`` to ``stop - 1``."""
        own = self.tangents(K)
        first = min(max(own.start, start), stop)
        return slice(first - start, max(min(own.stop, stop), first) - start)

    def once(self, grads: Params) -> Params:
        """Return the gradients in the first process, and zeros in the others that hold the same rows."""
        return grads if self.first else {name: torch.zeros_like(g) for name, g in grads.items()}

    def total(self, rows: int) -> int:
        """Return the count for all processes of something that this process has ``rows`` of, in proportion to rows."""
        return rows * self.all_rows // self.rows


ALONE = Share()
"""The share of a process that computes everything."""


@dataclass(frozen=True)
class Partial:
    """The part of an estimate that one process has computed.

    With N_r the number of targets of process r (the head's normaliser), the whole estimate has the loss
    Σ_r N_r loss_r / Σ_r N_r, and likewise gradients and scores.

    Attributes:
        loss: Mean loss over the rows of this process.
        grads: Mean gradients over these rows, as far as they need no scores.
        stats: Statistics of this part. Scores have shape ``(K,)``, zero for tangents of other processes.
        sums: Sums over rows, which add up without weights.
        products: Sums over rows of products of two gradients, each divided by N_r: they add up by (N_r / Σ_r N_r)².
        state_update: Change of learned state that all processes have computed alike.
        complete: Makes the estimate from the sum over all processes; by default it takes loss and gradients as they
            are.
    """

    loss: Tensor
    grads: Params
    stats: Stats
    sums: Params = field(default_factory=dict)
    products: Params = field(default_factory=dict)
    state_update: Params = field(default_factory=dict)
    complete: Complete | None = field(default=None, repr=False)

    def updated(self, change: Params) -> Partial:
        """Return this part with a change of learned state, to be completed without further steps."""
        return replace(self, complete=None, state_update=change)

    def completed(self, split: Split) -> Estimate:
        """Return the estimate; call it on the sum over all processes."""
        if self.complete is not None:
            return self.complete(split, self)
        stats = replace(self.stats, norms={**self.stats.norms, **_norms(split, self)})
        return Estimate(self.loss, self.grads, stats, self.state_update)


Complete: TypeAlias = Callable[[Split, Partial], Estimate]
"""Makes the estimate from the sum of all parts."""


@dataclass(frozen=True)
class PartNeeds:
    """The requirements of an estimate that processes compute in parts: scores, noise by row, inputs of all rows.

    Attributes:
        scores: K, the number of scores, which processes with the same rows can divide; 0 for estimators without any.
        row_noise: Whether noise is drawn for every row, with :func:`splitfg.tangents.row_noise`.
        all_inputs: Whether every process needs inputs of all rows, or of the first ones; see
            :class:`SamplingEstimator`.

    Example:
        >>> import splitfg
        >>> splitfg.SplitFG(K=8).needs
        PartNeeds(scores=8, row_noise=False, all_inputs=False)
    """

    scores: int = 0
    row_noise: bool = False
    all_inputs: bool = False


@runtime_checkable
class PartialEstimator(Estimator, Protocol):
    """An estimator that computes its estimate in parts, so that several processes can share the work.

    Others are called with the rows of their process, and all their gradients are averaged: right for every estimate
    that is a mean over rows, at the price of sending every gradient.
    """

    @property
    def needs(self) -> PartNeeds:
        """Requirements of a part of the estimate on the processes."""

    def part(self, split: Split, x: Inputs, y: Target, *, generator: torch.Generator, share: Share) -> Partial:
        """Compute the part of the estimate for these rows and this share of the tangents.

        Args:
            split: The network.
            x: Inputs of this process.
            y: Target of this process.
            generator: In the same state in every process, and advanced alike in all of them.
            share: The part to compute.
        """


@runtime_checkable
class SamplingEstimator(PartialEstimator, Protocol):
    """An estimator that needs the inputs of some rows in every process, such as those that it measures on."""

    def measured_rows(self, split: Split, x: Inputs) -> int | None:
        """Return how many of the first rows of the whole batch every process needs; ``None`` for all of them."""


def _norms(split: Split, total: Partial) -> dict[str, Tensor]:
    """Compute the norms of the whole estimate that the parts have computed for themselves."""
    names = {"trunk": split.trunk_params(), "head": split.head_params(), "all": total.grads}
    own = {kind: {n: total.grads[n] for n in names[kind] if n in total.grads} for kind in names}
    return {kind: norm(grads, like=total.loss) for kind, grads in own.items() if kind in total.stats.norms}
