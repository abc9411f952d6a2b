"""Layers with parameters from an explicit generator, without use of torch's global random state.

Parameters are on the generator's device. A CPU generator followed by ``module.to(device)`` gives the same values on
every device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init


def uniform_fan_in_(tensor: Tensor, fan_in: int, *, generator: torch.Generator) -> None:
    """Fill in place with U(-1/√fan_in, 1/√fan_in), the default of torch's linear and convolution layers."""
    bound = 1 / math.sqrt(fan_in)
    nn.init.uniform_(tensor, -bound, bound, generator=generator)


def linear(in_features: int, out_features: int, *, generator: torch.Generator, bias: bool = True) -> nn.Linear:
    """Return a linear layer with W, b ~ U(±1/√in_features)."""
    layer: nn.Linear = skip_init(nn.Linear, in_features, out_features, bias=bias, device=generator.device)
    uniform_fan_in_(layer.weight, in_features, generator=generator)
    if bias:
        uniform_fan_in_(layer.bias, in_features, generator=generator)
    return layer


def normal_linear(in_features: int, out_features: int, *, generator: torch.Generator) -> nn.Linear:
    """Return a linear layer with W ~ N(0, 1/in_features) and b = 0."""
    layer: nn.Linear = skip_init(nn.Linear, in_features, out_features, device=generator.device)
    nn.init.normal_(layer.weight, std=1 / math.sqrt(in_features), generator=generator)
    nn.init.zeros_(layer.bias)
    return layer


def conv(in_channels: int, out_channels: int, *, size: int, stride: int = 1, generator: torch.Generator) -> nn.Conv2d:
    """Return a square convolution without bias that keeps the image size at stride 1, W ~ U(±1/√fan_in)."""
    layer: nn.Conv2d = skip_init(
        nn.Conv2d,
        in_channels,
        out_channels,
        size,
        stride=stride,
        padding=size // 2,
        bias=False,
        device=generator.device,
    )
    uniform_fan_in_(layer.weight, in_channels * size * size, generator=generator)
    return layer
