"""Search of stored keys in blocks of queries and keys, so that memory does not grow with their product."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from splitfg.learners._memory import Memory

# Largest block of scores: 16 MiB in float32.
_BLOCK_ELEMENTS = 2**22
# A softmax passes over its scores five times: blocks of 1 MiB, which fit a CPU's cache, take two thirds of the time.
_CACHED_ELEMENTS = 2**18
_QUERY_ROWS = 512
# Smaller exponents are raised to this one: their exp would be subnormal numbers, which are slow on CPUs.
_SMALLEST_EXPONENT = -80.0


@dataclass(frozen=True)
class Scaling:
    """Scaling of features before a comparison.

    Attributes:
        standardise: Subtract the stored features' mean and divide by their standard deviation.
        unit: Then scale every feature vector to length 1, so that q·k is a cosine.
    """

    standardise: bool = True
    unit: bool = True

    def fit(self, keys: Tensor) -> FittedScaling:
        """Return the scaling with the statistics of these features."""
        if not self.standardise:
            return FittedScaling(keys.new_zeros(()), keys.new_ones(()), self.unit)
        deviation, mean = torch.std_mean(keys, dim=0, correction=0)
        # divide constant features by 1, which leaves them at zero
        return FittedScaling(mean, torch.where(deviation > 0, deviation, 1.0), self.unit)


@dataclass(frozen=True)
class FittedScaling:
    """(features - mean) / deviation, then, if ``unit``, divided by its length."""

    mean: Tensor
    deviation: Tensor
    unit: bool

    def __call__(self, features: Tensor) -> Tensor:
        """Return scaled features of the same shape ``(..., d)``."""
        scaled = (features - self.mean) / self.deviation
        return F.normalize(scaled, dim=-1) if self.unit else scaled


def softmax_readout(
    queries: Tensor, memory: Memory, scaling: FittedScaling, betas: Sequence[float], encode: Callable[[Tensor], Tensor]
) -> Tensor:
    """Compute softmax(β q Kᵀ) V for every β, with a running softmax over blocks of keys.

    Args:
        queries: Features, shape ``(B, d)``.
        memory: Keys and values.
        scaling: Applied to queries and keys.
        betas: Inverse temperatures.
        encode: Maps stored values to rows of V, ``(n, ...)`` to ``(n, C)``.

    Returns:
        The weighted means of V, shape ``(len(betas), B, C)``.
    """
    blocks = [_readout_rows(scaling(q), memory, scaling, betas, encode) for q in queries.split(_QUERY_ROWS)]
    return torch.cat(blocks, dim=1)


def nearest(queries: Tensor, memory: Memory, scaling: FittedScaling, k: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Find the k stored pairs with the largest q·k, for one block of queries at a time.

    Yields:
        Scores and values, each ``(b, min(k, count))``, largest score first.
    """
    for rows in queries.split(_QUERY_ROWS):
        q, scores, values = (
            scaling(rows),
            queries.new_empty(rows.shape[0], 0),
            memory.values.new_empty(rows.shape[0], 0),
        )
        for keys, stored in memory.blocks(_key_rows(q, _BLOCK_ELEMENTS)):
            scores = torch.cat([scores, q @ scaling(keys).T], dim=1)
            values = torch.cat([values, stored.expand(q.shape[0], -1)], dim=1)
            scores, order = scores.topk(min(k, scores.shape[1]), dim=1)
            values = values.gather(1, order)
        yield scores, values


def _readout_rows(
    q: Tensor, memory: Memory, scaling: FittedScaling, betas: Sequence[float], encode: Callable[[Tensor], Tensor]
) -> Tensor:
    running = [_RunningSoftmax(beta) for beta in betas]
    most = _CACHED_ELEMENTS if q.device.type == "cpu" else _BLOCK_ELEMENTS
    for keys, values in memory.blocks(_key_rows(q, most)):
        scores, rows = q @ scaling(keys).T, encode(values)
        for one in running:
            one.add(scores, rows)
    return torch.stack([one.mean() for one in running])


class _RunningSoftmax:
    """softmax(β s) V over blocks of s and V, with sums relative to the largest score so far."""

    def __init__(self, beta: float) -> None:
        self._beta = beta
        self._top: Tensor | None = None
        self._mass = self._sum = torch.empty(0)

    def add(self, scores: Tensor, rows: Tensor) -> None:
        scores = self._beta * scores
        top = scores.amax(dim=1, keepdim=True)
        top = top if self._top is None else torch.maximum(top, self._top)
        weights = scores.sub_(top).clamp_(min=_SMALLEST_EXPONENT).exp_()
        mass, weighted = weights.sum(dim=1, keepdim=True), weights @ rows
        if self._top is not None:
            shrink = (self._top - top).exp()
            mass, weighted = mass + shrink * self._mass, weighted + shrink * self._sum
        self._top, self._mass, self._sum = top, mass, weighted

    def mean(self) -> Tensor:
        return self._sum / self._mass


def _key_rows(queries: Tensor, elements: int) -> int:
    return max(1, elements // queries.shape[0])
