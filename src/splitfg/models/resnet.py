"""CIFAR ResNets with GroupNorm: full backbones up to global pooling, and the light trunk of the flat head.

GroupNorm in place of BatchNorm keeps a trunk a pure function of its parameters and one image: no batch
statistics, so every Jacobian-vector product is well defined.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from splitfg.models._init import conv
from splitfg.sites import ResidualPath, layer_gradients, pull_back, under
from splitfg.types import Params

GROUPS = 8
"""GroupNorm groups, throughout."""


class ConvNorm(nn.Module):
    """A convolution without bias, GroupNorm with affine parameters, and ReLU if ``activated``."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        size: int = 3,
        stride: int = 1,
        activated: bool = False,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        self.activated = activated
        self.conv = conv(in_channels, out_channels, size=size, stride=stride, generator=generator)
        self.norm = nn.GroupNorm(GROUPS, out_channels, device=generator.device)

    def forward(self, x: Tensor) -> Tensor:
        """``(B, in, H, W)`` to ``(B, out, H/stride, W/stride)``."""
        y: Tensor = self.norm(self.conv(x))
        return torch.relu(y) if self.activated else y

    def layer_gradients(self, a: Tensor, delta: Tensor) -> Params:
        """As :func:`splitfg.sites.layer_gradients`: δ through ReLU and the norm in closed form, then the convolution's.

        The convolution is run once more, so that nothing but its input need be kept.
        """
        z = self.conv(a)
        if self.activated:
            delta = delta * (self.norm(z) > 0)
        delta, norm = pull_back(self.norm, z, delta)
        return {**under("conv", layer_gradients(self.conv, a, delta)), **under("norm", norm)}


class BasicBlock(nn.Module):
    """ReLU(x' + GN(conv(ReLU(GN(conv(x)))))); x' is x, or a 1x1 ConvNorm of it where the shape changes."""

    def __init__(self, in_channels: int, out_channels: int, *, stride: int = 1, generator: torch.Generator) -> None:
        super().__init__()
        self.first = ConvNorm(in_channels, out_channels, stride=stride, activated=True, generator=generator)
        self.second = ConvNorm(out_channels, out_channels, generator=generator)
        self.shortcut: nn.Module = (
            nn.Identity()
            if stride == 1 and in_channels == out_channels
            else ConvNorm(in_channels, out_channels, size=1, stride=stride, generator=generator)
        )
        self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """``(B, in, H, W)`` to ``(B, out, H/stride, W/stride)``."""
        y: Tensor = self.activation(self.shortcut(x) + self.second(self.first(x)))
        return y


class ResNet(nn.Module):
    """Stem, stages of BasicBlocks, global average pooling: images ``(B, 3, H, W)`` to h ``(B, widths[-1])``.

    Every stage but the first halves the image in its first block.

    Args:
        widths: Channels of every stage; multiples of 8, the number of GroupNorm groups.
        blocks: BasicBlocks in every stage.
        generator: Source of the initial parameters: convolutions U(±1/√fan_in), norms 1 and 0.
    """

    def __init__(self, *, widths: Sequence[int], blocks: Sequence[int], generator: torch.Generator) -> None:
        super().__init__()
        if len(widths) != len(blocks):
            raise ValueError(f"widths and blocks name the same stages, got {widths} and {blocks}")
        self.stem = ConvNorm(3, widths[0], activated=True, generator=generator)
        layers: list[nn.Module] = []
        channels = widths[0]
        for stage, (width, count) in enumerate(zip(widths, blocks, strict=True)):
            for block in range(count):
                stride = 2 if stage > 0 and block == 0 else 1
                layers.append(BasicBlock(channels, width, stride=stride, generator=generator))
                channels = width
        self.blocks = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        """The globally averaged features h."""
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x.mean(dim=(-2, -1))


class FlatTrunk(nn.Module):
    """The light trunk of the flat head: stem and first BasicBlock, flattened.

    Maps images ``(B, 3, H, W)`` to h ``(B, width * H * W)``. Width 16 is the ResNet-20's (5,136 parameters,
    h of 16,384 on CIFAR), width 64 the ResNet-18's (75,840 parameters, h of 65,536).
    """

    def __init__(self, *, width: int, generator: torch.Generator) -> None:
        super().__init__()
        self.stem = ConvNorm(3, width, activated=True, generator=generator)
        self.block = BasicBlock(width, width, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        """The flattened feature map h."""
        features: Tensor = self.block(self.stem(x))
        return features.flatten(start_dim=-3)

    def residual_path(self) -> ResidualPath:
        """The stem and the block's last ConvNorm write to the stream, whose top goes through ReLU to h."""
        return ResidualPath(("stem", "block.second"), top="block.activation")


def resnet20(*, generator: torch.Generator) -> ResNet:
    """The CIFAR ResNet-20 backbone, h ``(B, 64)``: 272,474 parameters with a 10-class head."""
    return ResNet(widths=(16, 32, 64), blocks=(3, 3, 3), generator=generator)


def resnet18(*, generator: torch.Generator) -> ResNet:
    """The ResNet-18 backbone with a 3x3 stem and no max-pool, h ``(B, 512)``: 11.2M parameters."""
    return ResNet(widths=(64, 128, 256, 512), blocks=(2, 2, 2, 2), generator=generator)
