"""Batches as a function of the step, epoch after epoch, rows counted by their weight."""

from __future__ import annotations

import torch
from torch import Tensor

# Far apart, so that epochs of neighbouring seeds have nothing in common.
_SEED_STRIDE = 1_000_003
_BELOW_ONE = 1.0 - 2.0**-53


class Epochs:
    """Every epoch goes through n rows in a random order of its own; batches run on across epochs.

    With weights w, an epoch holds row i either ⌊n w_i / Σw⌋ or ⌈n w_i / Σw⌉ times, n w_i / Σw on average (systematic
    sampling): with equal weights once, with weight zero never, and integer weights stand for repetitions.

    Args:
        count: Number of rows n.
        batch: Rows per batch, at most ``count``.
        seed: Of the orders; an epoch depends on nothing else.
        weight: Non-negative weights, shape ``(count,)``, not all zero.
    """

    def __init__(self, count: int, *, batch: int, seed: int, weight: Tensor | None = None) -> None:
        self.count, self.batch, self._seed = count, min(batch, count), seed
        self._edges = None if weight is None else _cumulative(weight)
        self._epochs: dict[int, Tensor] = {}

    @property
    def steps(self) -> int:
        """Batches that an epoch takes, the last of which may be short."""
        return -(-self.count // self.batch)

    def once(self, step: int) -> Tensor:
        """Rows of this step where there is only the first epoch: its last batch is short."""
        return self._epoch(0)[step * self.batch : (step + 1) * self.batch]

    def rows(self, step: int) -> Tensor:
        """Rows of the batch of this step, shape ``(batch,)``."""
        epoch, start = divmod(step * self.batch, self.count)
        rows = self._epoch(epoch)[start : start + self.batch]
        rest = self.batch - len(rows)
        return torch.cat([rows, self._epoch(epoch + 1)[:rest]]) if rest else rows

    def _epoch(self, epoch: int) -> Tensor:
        if epoch not in self._epochs:
            generator = torch.Generator().manual_seed(self._seed * _SEED_STRIDE + epoch)
            self._epochs = {epoch: self._draw(generator)}
        return self._epochs[epoch]

    def _draw(self, generator: torch.Generator) -> Tensor:
        order = torch.randperm(self.count, generator=generator)
        if self._edges is None:
            return order
        offset = torch.rand((), generator=generator, dtype=torch.float64)
        points = (torch.arange(self.count, dtype=torch.float64) + offset) / self.count
        return torch.searchsorted(self._edges, points.clamp_(max=_BELOW_ONE), right=True)[order]


def _cumulative(weight: Tensor) -> Tensor:
    """Shares of the weight up to and including each row; exactly 1 from the last row that has any."""
    total = weight.double().cumsum(0)
    return total / total[-1]
