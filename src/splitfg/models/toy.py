"""The toy trunk of the variance experiment."""

from __future__ import annotations

import torch

from splitfg.models._init import normal_linear
from splitfg.models.mlp import MLP

FEATURES = 16
WIDTHS = (32, 32)


def toy_trunk(*, generator: torch.Generator) -> MLP:
    """Return the 16-32-32 ReLU MLP with P_trunk = 1,600 parameters, from x ``(B, 16)`` to h ``(B, 32)``.

    W ~ N(0, 1/fan_in) and b = 0. A linear head with C classes on top of it has 33 C parameters.

    Example:
        >>> import torch
        >>> from splitfg.models import toy_trunk
        >>> sum(p.numel() for p in toy_trunk(generator=torch.Generator()).parameters())
        1600
    """
    return MLP(FEATURES, widths=WIDTHS, generator=generator, layer=normal_linear)
