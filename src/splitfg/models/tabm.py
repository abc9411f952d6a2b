"""The TabM-style trunk: an ensemble that shares one MLP, with rank-1 adapters per member.

Gorishniy et al., "TabM: Advancing tabular deep learning with parameter-efficient ensembling" (2025), with the
BatchEnsemble layers of Wen et al. (2020).
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from splitfg.models._init import uniform_fan_in_
from splitfg.sites import Activities, BlockPath, PathBlock
from splitfg.types import Params

ADAPTER_STD = 0.1
"""Standard deviation of the adapters around 1 at initialisation: enough to break the members' symmetry."""


class BatchEnsembleLinear(nn.Module):
    """y_i = ((x_i ∘ r_i) Wᵀ) ∘ s_i + b for member i, with shared W and b and the member's own adapters r_i and s_i.

    Maps x of shape ``(B, members, in_features)``, or ``(B, 1, in_features)`` to give every member the same
    input, to y of shape ``(B, members, out_features)``.

    Initialised with W ~ N(0, 1/in_features), b ~ U(±1/√in_features) and r, s ~ 1 + 0.1 N(0, 1). These W are √3 times as
    large as torch's default for linear layers, which trains better with noisy gradients.
    """

    def __init__(self, in_features: int, out_features: int, *, members: int, generator: torch.Generator) -> None:
        super().__init__()

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=generator.device))

        self.weight = empty(out_features, in_features)
        self.bias = empty(out_features)
        self.r = empty(members, in_features)
        self.s = empty(members, out_features)
        nn.init.normal_(self.weight, std=in_features**-0.5, generator=generator)
        uniform_fan_in_(self.bias, in_features, generator=generator)
        for adapter in (self.r, self.s):
            nn.init.normal_(adapter, mean=1.0, std=ADAPTER_STD, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        """Return the members' outputs y."""
        return ((x * self.r) @ self.weight.T) * self.s + self.bias

    def layer_gradients(self, a: Tensor, delta: Tensor) -> Params:
        """Compute the gradients of W, b, r and s from the input and δ; see :class:`~splitfg.sites.LocalLayer`.

        The gradient of r multiplies δ by Wᵀ, a backward step within the layer.
        """
        adapted, scaled = a * self.r, delta * self.s
        return {
            "weight": scaled.flatten(0, -2).T @ adapted.flatten(0, -2),
            "bias": delta.flatten(0, -2).sum(0),
            "r": ((scaled @ self.weight) * a).flatten(0, -3).sum(0),
            "s": (delta * (adapted @ self.weight.T)).flatten(0, -3).sum(0),
        }


class MemberMean(nn.Module):
    """The mean over members, from ``(B, members, d)`` to ``(B, d)``."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean over members."""
        return x.mean(dim=-2)

    def pull_back(self, x: Tensor, u: Tensor) -> tuple[Tensor, Params]:
        """Distribute u equally over the members; see :class:`~splitfg.sites.ClosedForm`."""
        return (u / x.shape[-2]).unsqueeze(-2).expand_as(x), {}


class TabM(nn.Module):
    """BatchEnsemble layers with ReLU, averaged over the members before a linear head.

    Maps x of shape ``(B, features)`` to h of shape ``(B, width)``. Because the average is linear, one linear
    head on h is the average of the members' heads, and stays exact.

    Args:
        features: Number of input features n.
        width: Hidden width d_h.
        layers: Number of BatchEnsemble layers.
        members: Ensemble members k_ens.
        generator: Source of the initial parameters.

    Raises:
        ValueError: If a size is not positive.

    Example:
        >>> import torch
        >>> from splitfg.models import TabM
        >>> TabM(10, width=16, members=4, generator=torch.Generator())(torch.randn(5, 10)).shape
        torch.Size([5, 16])
    """

    def __init__(
        self,
        features: int,
        *,
        width: int = 128,
        layers: int = 2,
        members: int = 8,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        if min(features, width, layers, members) < 1:
            raise ValueError(
                f"TabM needs positive features, width, layers and members, got {features}, {width}, {layers}, {members}"
            )
        sizes = [features] + [width] * layers
        self.layers = nn.ModuleList(
            BatchEnsembleLinear(n, m, members=members, generator=generator) for n, m in pairwise(sizes)
        )
        self.activations = nn.ModuleList(nn.ReLU() for _ in self.layers)
        self.mean = MemberMean()

    def forward(self, x: Tensor) -> Tensor:
        """Return the representation h, the mean over the members."""
        members = x.unsqueeze(-2)
        for layer, activation in zip(self.layers, self.activations, strict=True):
            members = activation(layer(members))
        h: Tensor = self.mean(members)
        return h

    def activities(self) -> Activities:
        """Return the sites of activity tangents: every layer; members do not mix before their mean."""
        return Activities(tuple(f"layers.{i}" for i in range(len(self.layers))), top="mean", rows=2)

    def block_path(self) -> BlockPath:
        """Return every layer with its ReLU as a chain, up to the mean over members."""
        blocks = (PathBlock((f"layers.{i}", f"activations.{i}")) for i in range(len(self.layers)))
        return BlockPath(tuple(blocks), top="mean")
