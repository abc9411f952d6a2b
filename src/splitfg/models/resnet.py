"""CIFAR ResNets with GroupNorm: full backbones up to global pooling, and the light trunk of the flat head.

GroupNorm instead of BatchNorm makes the trunk a function of its parameters and one image, without batch statistics,
so that every Jacobian-vector product is well defined.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.grad import conv2d_input

from splitfg.models._init import conv
from splitfg.sites import BlockPath, PathBlock, ResidualPath, layer_gradients, pull_back, under
from splitfg.types import Params

GROUPS = 8
"""Number of groups of every GroupNorm."""


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
        """Map ``(B, in, H, W)`` to ``(B, out, H/stride, W/stride)``."""
        y: Tensor = self.norm(self.conv(x))
        return torch.relu(y) if self.activated else y

    def layer_gradients(self, a: Tensor, delta: Tensor) -> Params:
        """Compute the gradients of convolution and norm from the input and δ; see :class:`~splitfg.sites.LocalLayer`.

        Pulls δ back through ReLU and the norm in closed form. Recomputes the convolution, so that callers need to
        store its input only.
        """
        z = self.conv(a)
        if self.activated:
            delta = delta * (self.norm(z) > 0)
        delta, norm = pull_back(self.norm, z, delta)
        return {**under("conv", layer_gradients(self.conv, a, delta)), **under("norm", norm)}

    def input_gradient(self, a: Tensor, delta: Tensor) -> Tensor:
        """Return dL/da from the input a and δ, in closed form; for layers without ReLU."""
        delta, _ = pull_back(self.norm, self.conv(a), delta)
        found: Tensor = conv2d_input(a.shape, self.conv.weight, delta, self.conv.stride, self.conv.padding)
        return found


class BasicBlock(nn.Module):
    """ReLU(x' + GN(conv(ReLU(GN(conv(x)))))), with x' = x, or a 1x1 ConvNorm of x if the shape changes."""

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
        """Map ``(B, in, H, W)`` to ``(B, out, H/stride, W/stride)``."""
        y: Tensor = self.activation(self.shortcut(x) + self.second(self.first(x)))
        return y

    def skip_back(self, x: Tensor, y: Tensor, delta: Tensor) -> Tensor:
        """Pass δ through the last ReLU and the shortcut; see :class:`~splitfg.sites.SkipBlock`."""
        delta = delta * (y > 0)
        return self.shortcut.input_gradient(x, delta) if isinstance(self.shortcut, ConvNorm) else delta


class GlobalPool(nn.Module):
    """The mean over pixels, from ``(B, C, H, W)`` to ``(B, C)``."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean over pixels."""
        return x.mean(dim=(-2, -1))

    def pull_back(self, x: Tensor, u: Tensor) -> tuple[Tensor, Params]:
        """Distribute u equally over the pixels; see :class:`~splitfg.sites.ClosedForm`."""
        pixels = x.shape[-1] * x.shape[-2]
        return (u / pixels)[..., None, None].expand_as(x), {}


class ResNet(nn.Module):
    """Stem, stages of BasicBlocks and global average pooling: maps images ``(B, 3, H, W)`` to h ``(B, widths[-1])``.

    Every stage but the first halves the image in its first block.

    Args:
        widths: Channels of every stage; multiples of 8, the number of GroupNorm groups.
        blocks: Number of BasicBlocks in every stage.
        generator: Source of the initial parameters: convolutions U(±1/√fan_in), norms 1 and 0.

    Raises:
        ValueError: If ``widths`` and ``blocks`` differ in length.

    Example:
        >>> import torch
        >>> from splitfg.models import ResNet
        >>> trunk = ResNet(widths=(8, 16), blocks=(1, 1), generator=torch.Generator())
        >>> trunk(torch.randn(2, 3, 8, 8)).shape
        torch.Size([2, 16])
    """

    def __init__(self, *, widths: Sequence[int], blocks: Sequence[int], generator: torch.Generator) -> None:
        super().__init__()
        if len(widths) != len(blocks):
            raise ValueError(f"widths and blocks must have one entry per stage each, got {widths} and {blocks}")
        self.stem = ConvNorm(3, widths[0], activated=True, generator=generator)
        layers: list[nn.Module] = []
        channels = widths[0]
        for stage, (width, count) in enumerate(zip(widths, blocks, strict=True)):
            for block in range(count):
                stride = 2 if stage > 0 and block == 0 else 1
                layers.append(BasicBlock(channels, width, stride=stride, generator=generator))
                channels = width
        self.blocks = nn.ModuleList(layers)
        self.pool = GlobalPool()

    def forward(self, x: Tensor) -> Tensor:
        """Return the globally averaged features h."""
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        h: Tensor = self.pool(x)
        return h

    def block_path(self) -> BlockPath:
        """Return stem and BasicBlocks as a chain; one gradient is predicted for all pixels of an image."""
        names = ["stem", *(f"blocks.{i}" for i in range(len(self.blocks)))]
        return BlockPath(tuple(PathBlock((name,)) for name in names), top="pool", pooled=True)


class FlatTrunk(nn.Module):
    """The light trunk of the flat head: stem and first BasicBlock, flattened.

    Maps images ``(B, 3, H, W)`` to h ``(B, width * H * W)``.

    Args:
        width: Channels: 16 as in ResNet-20 (5,136 parameters, h of 16,384 on CIFAR), or 64 as in ResNet-18 (75,840
            parameters, h of 65,536).
        generator: Source of the initial parameters.

    Example:
        >>> import torch
        >>> from splitfg.models import FlatTrunk
        >>> FlatTrunk(width=8, generator=torch.Generator())(torch.randn(2, 3, 4, 4)).shape
        torch.Size([2, 128])
    """

    def __init__(self, *, width: int, generator: torch.Generator) -> None:
        super().__init__()
        self.stem = ConvNorm(3, width, activated=True, generator=generator)
        self.block = BasicBlock(width, width, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        """Return the flattened feature map h."""
        features: Tensor = self.block(self.stem(x))
        return features.flatten(start_dim=-3)

    def residual_path(self) -> ResidualPath:
        """Return the residual stream: stem and last ConvNorm write to it, and a ReLU maps its top to h."""
        return ResidualPath(("stem", "block.second"), top="block.activation")

    def block_path(self) -> BlockPath:
        """Return stem and block as a chain up to the block's last ReLU."""
        return BlockPath((PathBlock(("stem",)), PathBlock(("block",))))


def resnet20(*, generator: torch.Generator) -> ResNet:
    """Return the CIFAR ResNet-20 backbone, h ``(B, 64)``: 272,474 parameters with a 10-class head."""
    return ResNet(widths=(16, 32, 64), blocks=(3, 3, 3), generator=generator)


def resnet18(*, generator: torch.Generator) -> ResNet:
    """Return the ResNet-18 backbone with a 3x3 stem and no max-pool, h ``(B, 512)``: 11.2M parameters."""
    return ResNet(widths=(64, 128, 256, 512), blocks=(2, 2, 2, 2), generator=generator)
