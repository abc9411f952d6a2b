"""Modules for ONNX operators that torch has no closed form for."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from splitfg.types import Params


class ChannelNorm(nn.Module):
    """Batch normalisation with fixed statistics: y = γ (x - μ) / σ + β, for every channel (dimension 1).

    Args:
        weight: γ.
        bias: β.
        mean: μ.
        std: σ.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter, mean: Tensor, std: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self._mean, self._std = mean, std

    def forward(self, x: Tensor) -> Tensor:
        """Normalise."""
        scale = self.weight / self._std
        return torch.addcmul(_spread(self.bias - scale * self._mean, x), x, _spread(scale, x))

    def pull_back(self, x: Tensor, u: Tensor) -> tuple[Tensor, Params]:
        """Return γ u / σ, and the gradients Σ u x̂ and Σ u."""
        back = u * _spread(self.weight / self._std, x)
        if not self._parameters:
            return back, {}
        over = (0, *range(2, x.ndim))
        total = u.sum(over)
        own = {"weight": ((u * x).sum(over) - self._mean * total) / self._std, "bias": total}
        return back, {name: own[name] for name in self._parameters}


class Rounding(nn.Module):
    """A quantised copy of a tensor: y = s (clip(round(x / s) + z, low, high) - z).

    The pullback passes u where x lies inside the range, and zero where it saturates: the derivative of the clipping,
    with rounding ignored.

    Args:
        scale: s; one number, or one for every entry of ``axis``.
        zero: z.
        low: Smallest stored number.
        high: Largest stored number.
        axis: Dimension that scales differ along.
    """

    def __init__(self, scale: Tensor, zero: Tensor, low: int, high: int, axis: int) -> None:
        super().__init__()
        self._scale, self._zero, self._low, self._high, self._axis = scale, zero, low, high, axis

    def forward(self, x: Tensor) -> Tensor:
        """Round."""
        scale, zero = self._shaped(x)
        return (torch.clamp(torch.round(x / scale) + zero, self._low, self._high) - zero) * scale

    def pull_back(self, x: Tensor, u: Tensor) -> tuple[Tensor, Params]:
        """Return u inside the range, zero outside."""
        scale, zero = self._shaped(x)
        stored = x / scale + zero
        return u * ((stored >= self._low - 0.5) & (stored <= self._high + 0.5)), {}

    def _shaped(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self._scale.numel() == 1:
            return self._scale.reshape(()), self._zero.reshape(())
        shape = [-1 if i == self._axis % x.ndim else 1 for i in range(x.ndim)]
        return self._scale.view(shape), self._zero.view(shape)


def _spread(values: Tensor, x: Tensor) -> Tensor:
    return values.view(-1, *[1] * (x.ndim - 2))
