"""Rows of a batch as a function of the step, sampled by weight."""

from __future__ import annotations

import torch
from torch import Tensor

# Far apart, so that epochs of neighbouring seeds have nothing in common.
_SEED_STRIDE = 1_000_003
_BELOW_ONE = 1.0 - 2.0**-53


class Epochs:
    """Random order of n rows per epoch; batches continue across epochs.

    With weights w, an epoch contains row i either ⌊n w_i / Σw⌋ or ⌈n w_i / Σw⌉ times, n w_i / Σw on average (systematic
    sampling). Equal weights give every row once; weight zero excludes a row; integer weights act as repetitions.

    Args:
        count: Number of rows n.
        batch: Rows per batch; larger values are reduced to ``count``.
        seed: Seed of the orders; an epoch's order depends on seed and epoch alone.
        weight: Non-negative weights, shape ``(count,)``, not all zero.

    Example:
        >>> from splitfg.training import Epochs
        >>> epochs = Epochs(5, batch=2, seed=0)
        >>> sorted(row for step in range(3) for row in epochs.once(step).tolist())
        [0, 1, 2, 3, 4]
    """

    def __init__(self, count: int, *, batch: int, seed: int, weight: Tensor | None = None) -> None:
        self.count, self.batch, self._seed = count, min(batch, count), seed
        self._edges = None if weight is None else _cumulative(weight)
        self._epochs: dict[int, Tensor] = {}

    @property
    def steps(self) -> int:
        """Number of batches in one epoch, counting a short last one."""
        return -(-self.count // self.batch)

    def once(self, step: int) -> Tensor:
        """Return the rows of this step within the first epoch, whose last batch may be short."""
        return self._epoch(0)[step * self.batch : (step + 1) * self.batch]

    def rows(self, step: int) -> Tensor:
        """Return the rows of this step, shape ``(batch,)``."""
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
    """Return the cumulative share of the weight, exactly 1 from the last row with a positive weight on."""
    total = weight.double().cumsum(0)
    return total / total[-1]
