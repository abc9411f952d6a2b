"""Losses of any function of a row's outputs and target."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from splitfg.errors import SplitError
from splitfg.heads._output_loss import OutputLoss, RowData, RowEntries, shape_problem


class RowLoss(OutputLoss):
    """A loss of your own, L = (1/N) Σ_n f(ŷ_n, y_n) over N rows, with δ by reverse mode through f alone.

    Args:
        function: f, from outputs ``(n, C)`` and targets ``(n, ...)`` to one loss for every row, shape ``(n,)``.
        target_dims: Number of dimensions of one row's target: 1 for vectors, 0 for numbers or class indices.

    Raises:
        SplitError: If it is no function, or a module with trained parameters.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from torch.nn import functional as F
        >>> import splitfg
        >>> def labels(outputs, y):
        ...     return F.binary_cross_entropy_with_logits(outputs, y, reduction="none").mean(1)
        >>> head = splitfg.LinearHead(nn.Linear(8, 5), loss=splitfg.RowLoss(labels))
        >>> head(torch.randn(16, 8), torch.ones(16, 5)).u.shape
        torch.Size([16, 8])
    """

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], *, target_dims: int = 1) -> None:
        super().__init__()
        if not callable(function) or isinstance(function, type):
            raise SplitError([f"the loss must be a function (outputs, target) -> one loss per row, got {function!r}"])
        if isinstance(function, nn.Module) and any(p.requires_grad for p in function.parameters()):
            raise SplitError(["the loss has trained parameters: move them to the module of a ReverseModeHead"])
        self.function, self.target_dims = function, target_dims

    def fold(self, target: Tensor, width: int) -> Tensor:  # noqa: ARG002
        """Return the rows' targets, shape ``(n, ...)``."""
        return target.reshape(-1, *target.shape[target.ndim - self.target_dims :])

    def normaliser(self, target: Tensor, width: int) -> Tensor:
        """Return the number of rows."""
        return torch.full((), len(self.fold(target, width)), dtype=torch.float32, device=target.device)

    def summed(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Compute Σ_n f(ŷ_n, y_n)."""
        return self.rowwise(outputs, target).sum()

    def rowwise(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Compute f(ŷ_n, y_n)."""
        losses: Tensor = self.function(outputs, target.to(outputs.dtype) if target.is_floating_point() else target)
        if losses.shape != outputs.shape[:1]:
            words = f"the loss function returns shape {tuple(losses.shape)} for {len(outputs)} rows of outputs"
            raise SplitError([f'{words}: return one loss per row, as F.mse_loss(..., reduction="none").mean(1) does'])
        return losses

    def rows(self, target: Tensor, normaliser: Tensor, width: int, dtype: torch.dtype) -> RowData:  # noqa: ARG002
        """Return the targets and N."""
        return (target, normaliser.to(dtype))

    def accumulate(self, outputs: Tensor, bias: Tensor | None, statistics: RowData | None) -> RowData:
        """Return all outputs so far, with their bias: f may read them in any way."""
        block = outputs.clone() if bias is None else outputs + bias
        return (block if statistics is None else torch.cat([*statistics, block], dim=1),)

    def base(self, rows: RowData, statistics: RowData) -> Tensor:
        """Compute the whole loss."""
        target, scale = rows
        total: Tensor = self.summed(statistics[0], target) / scale
        return total

    def residual_(
        self,
        outputs: Tensor,
        bias: Tensor | None,  # noqa: ARG002
        first: Tensor | None,
        rows: RowData,
        statistics: RowData,
    ) -> tuple[Tensor, RowEntries | None]:
        """Compute δ of all outputs and write the block's columns; :meth:`base` has its part of the loss."""
        target, scale = rows
        delta = torch.func.grad(lambda z: self.summed(z, target))(statistics[0]) / scale
        if first is not None:
            delta = delta[:, first + torch.arange(outputs.shape[1], device=outputs.device)]
        outputs.copy_(delta)
        return torch.zeros_like(scale), None

    def shape_problems(self, leading: tuple[int, ...], width: int, target: Tensor) -> list[str]:  # noqa: ARG002
        """Require a target for every row of outputs."""
        own = target.shape[max(target.ndim - self.target_dims, 0) :]
        if tuple(target.shape) == (*leading, *own) and len(own) == self.target_dims:
            return []
        wanted = f"({', '.join(map(str, leading))}, ...)"
        return [f"{shape_problem(target, wanted)} with {self.target_dims} more dimensions, or set target_dims=..."]

    def value_problems(self, width: int, target: Tensor) -> list[str]:  # noqa: ARG002
        """Require finite values."""
        if target.is_floating_point() and not bool(torch.isfinite(target).all()):
            return ["targets contain NaN or infinite values: drop or impute those rows"]
        return []
