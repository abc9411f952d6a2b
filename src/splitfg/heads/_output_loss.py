"""The contract of losses on a head's outputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

RowData: TypeAlias = tuple[Any, ...]
"""Per-row tensors of a loss; their meaning is private to the loss."""

RowEntries: TypeAlias = tuple[Tensor, Tensor]
"""One entry per row: its column and the value to add there, both ``(n, 1)``."""


class OutputLoss(nn.Module, ABC):
    """A loss over rows of outputs, L = (1/N) Σ_n l_n, with δ = dL/d(outputs) in closed form.

    The normaliser N is a separate method, so that a batch can be processed in parts: each part divides by N of the
    whole batch, and the losses of the parts sum to L.

    The outputs may come in blocks of columns, without their bias. A first pass over the blocks calls :meth:`accumulate`
    to collect statistics of whole rows. A second pass calls :meth:`residual_`, which turns each block into its δ. The
    loss is :meth:`base` plus the return values of the second pass.
    """

    @abstractmethod
    def fold(self, target: Tensor, width: int) -> Tensor:
        """Fold the target's leading dimensions into one, for a head with ``width`` outputs."""

    @abstractmethod
    def normaliser(self, target: Tensor, width: int) -> Tensor:
        """Compute N for this target, a scalar tensor; N of a batch is the sum over its parts."""

    @abstractmethod
    def summed(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Compute Σ_n l_n as a differentiable function of the outputs ``(n, C)``, for a folded target."""

    @abstractmethod
    def rowwise(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Compute l_n for every row, shape ``(n,)``, for a folded target."""

    @abstractmethod
    def rows(self, target: Tensor, normaliser: Tensor, width: int, dtype: torch.dtype) -> RowData:
        """Prepare data of the rows that does not depend on the outputs, from a folded target."""

    @abstractmethod
    def accumulate(self, outputs: Tensor, bias: Tensor | None, statistics: RowData | None) -> RowData:
        """Update the statistics of the rows with a block of outputs.

        Args:
            outputs: The block, shape ``(n, c)``, without its bias.
            bias: The block's bias ``(c,)``.
            statistics: Return value for the previous block; ``None`` for the first one.
        """

    @abstractmethod
    def base(self, rows: RowData, statistics: RowData) -> Tensor:
        """Compute the part of the loss that depends on the accumulated statistics alone."""

    @abstractmethod
    def residual_(
        self, outputs: Tensor, bias: Tensor | None, first: Tensor | None, rows: RowData, statistics: RowData
    ) -> tuple[Tensor, RowEntries | None]:
        """Turn a block of outputs into its δ, in place.

        Args:
            outputs: The block, shape ``(n, c)``, without its bias.
            bias: The block's bias ``(c,)``.
            first: The block's first column, a 0-d integer tensor; ``None`` if it has all columns.
            rows: From :meth:`rows`.
            statistics: From :meth:`accumulate`, over all blocks.

        Returns:
            The block's part of the loss, and entries that the caller adds to δ, if any.
        """

    @abstractmethod
    def shape_problems(self, leading: tuple[int, ...], width: int, target: Tensor) -> list[str]:
        """List problems of the target's shape, for outputs of shape ``(*leading, width)``."""

    @abstractmethod
    def value_problems(self, width: int, target: Tensor) -> list[str]:
        """List problems of the target's dtype and values, for ``width`` outputs."""


def shape_problem(target: Tensor, wanted: str) -> str:
    """State the shape of a target, and the one it should have."""
    return f"targets have shape {tuple(target.shape)}: pass shape {wanted}"
