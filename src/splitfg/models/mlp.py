"""The MLP trunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from splitfg.models._init import linear
from splitfg.sites import BlockPath, PathBlock


class MLP(nn.Module):
    """A ReLU MLP: h_l = ReLU(W_l h_{l-1} + b_l) with h_0 = x; the last h_l is the representation.

    Maps x of shape ``(..., features)`` to h of shape ``(..., widths[-1])``.

    Args:
        features: Number of input features n.
        widths: Width of every layer; the default is the n-128-128 network of the tabular baselines.
        generator: Source of the initial parameters.
        layer: Creates a layer; by default with W, b ~ U(±1/√fan_in).

    Attributes:
        sizes: ``(features, *widths)``.
        layers: The linear layers, in order.

    Raises:
        ValueError: If there is no layer, or a size is not positive.

    Example:
        >>> import torch
        >>> from splitfg.models import MLP
        >>> MLP(10, widths=(32, 16), generator=torch.Generator())(torch.randn(5, 10)).shape
        torch.Size([5, 16])
    """

    def __init__(
        self,
        features: int,
        *,
        widths: Sequence[int] = (128, 128),
        generator: torch.Generator,
        layer: Callable[..., nn.Linear] = linear,
    ) -> None:
        super().__init__()
        self.sizes = (features, *widths)
        if len(self.sizes) < 2 or min(self.sizes) < 1:
            raise ValueError(f"an MLP needs at least one layer and positive sizes, got {self.sizes}")
        self.layers = nn.ModuleList(layer(n, m, generator=generator) for n, m in pairwise(self.sizes))
        self.activations = nn.ModuleList(nn.ReLU() for _ in self.layers)

    def forward(self, x: Tensor) -> Tensor:
        """Return the representation h."""
        for layer, activation in zip(self.layers, self.activations, strict=True):
            x = activation(layer(x))
        return x

    def block_path(self) -> BlockPath:
        """Return every layer with its ReLU as a chain."""
        return BlockPath(tuple(PathBlock((f"layers.{i}", f"activations.{i}")) for i in range(len(self.layers))))
