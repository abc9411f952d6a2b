"""Half squared error on a head's outputs, with its derivative in closed form."""

from __future__ import annotations

import torch
from torch import Tensor

from splitfg.heads._output_loss import OutputLoss, RowData, RowEntries, shape_problem


class SquaredError(OutputLoss):
    """Half squared error, L = 1/(2N) Σ_n ‖ŷ_n - y_n‖², with δ = (ŷ - y) / N and N the number of rows.

    With C outputs this is C / 2 times ``nn.MSELoss``, which takes the mean over outputs too; ``RowLoss`` computes that.

    The target has the shape of the outputs; with a single output its last dimension may be omitted.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> import splitfg
        >>> head = splitfg.LinearHead(nn.Linear(8, 1), loss=splitfg.SquaredError())
        >>> head(torch.randn(16, 8), torch.randn(16)).u.shape
        torch.Size([16, 8])
    """

    def fold(self, target: Tensor, width: int) -> Tensor:
        """Return the values, shape ``(n, width)``."""
        return target.reshape(-1, width)

    def normaliser(self, target: Tensor, width: int) -> Tensor:
        """Return the number of rows."""
        return torch.full((), target.numel() / width, dtype=torch.float32, device=target.device)

    def summed(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Compute ½ Σ_n ‖ŷ_n - y_n‖²."""
        return self.rowwise(outputs, target).sum()

    def rowwise(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Compute ½ ‖ŷ_n - y_n‖²."""
        return 0.5 * (outputs - target.to(outputs.dtype)).square().sum(dim=1)

    def rows(self, target: Tensor, normaliser: Tensor, width: int, dtype: torch.dtype) -> RowData:  # noqa: ARG002
        """Return the values and N."""
        return (target.to(dtype), normaliser.to(dtype))

    def accumulate(self, outputs: Tensor, bias: Tensor | None, statistics: RowData | None) -> RowData:  # noqa: ARG002
        """Return an empty tuple: the error of an output depends on no other output."""
        return ()

    def base(self, rows: RowData, statistics: RowData) -> Tensor:  # noqa: ARG002
        """Return zero."""
        return torch.zeros_like(rows[1])

    def residual_(
        self,
        outputs: Tensor,
        bias: Tensor | None,
        first: Tensor | None,
        rows: RowData,
        statistics: RowData,  # noqa: ARG002
    ) -> tuple[Tensor, RowEntries | None]:
        """Compute 1/(2N) Σ_n Σ_c (ŷ_nc - y_nc)² and δ = (ŷ - y) / N over the block's columns c."""
        target, scale = rows
        if first is not None:
            target = target[:, first + torch.arange(outputs.shape[1], device=outputs.device)]
        outputs.sub_(target if bias is None else target - bias)
        loss = 0.5 * outputs.square().sum() / scale
        outputs.div_(scale)
        return loss, None

    def curvature(self, outputs: Tensor, moves: Tensor, rows: RowData) -> Tensor:  # noqa: ARG002
        """Compute 1/N Σ_n dz_ngᵀ dz_nh."""
        scale: Tensor = rows[1]
        return torch.einsum("gnc,hnc->gh", moves, moves) / scale

    def shape_problems(self, leading: tuple[int, ...], width: int, target: Tensor) -> list[str]:
        """Require the shape of the outputs."""
        shapes = [(*leading, width), leading] if width == 1 else [(*leading, width)]
        return [] if tuple(target.shape) in shapes else [shape_problem(target, " or ".join(map(str, shapes)))]

    def value_problems(self, width: int, target: Tensor) -> list[str]:  # noqa: ARG002
        """Require finite floating-point values."""
        if not target.is_floating_point():
            return [
                f"targets are {target.dtype}, but squared error needs floating-point values: pass target.float(),"
                " or use CrossEntropy() for classes"
            ]
        if not bool(torch.isfinite(target).all()):
            return ["targets contain NaN or infinite values: drop or impute those rows"]
        return []
