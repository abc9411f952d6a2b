"""Recipes of the networks in the image experiments: full backbones, the flat head's light trunk, a plain MLP.

Nothing here imports torch until something is built.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from splitfg.errors import raise_if
from splitfg.recipes.checks import below

if TYPE_CHECKING:
    import torch

    from splitfg.heads import LinearHead
    from splitfg.models import MLP, FlatTrunk, ResNet

Shape = tuple[int, int, int]
"""Channels, height and width of an image."""


class NetworkRecipe(ABC):
    """Sizes of a network; :meth:`trunk` and :meth:`head` make its parts for images of a shape."""

    @abstractmethod
    def trunk(self, shape: Shape, generator: torch.Generator) -> ResNet | FlatTrunk | MLP:
        """Build the module that maps images to h."""

    @abstractmethod
    def widths_from_h(self, shape: Shape) -> tuple[int, ...]:
        """Return the width of h, and of the layers inside the head."""

    def head(self, shape: Shape, classes: int, generator: torch.Generator) -> LinearHead:
        """Build the closed-form head that maps h to the classes."""
        from splitfg.heads import LinearHead
        from splitfg.models import linear

        sizes = (*self.widths_from_h(shape), classes)
        return LinearHead(*(linear(n, m, generator=generator) for n, m in pairwise(sizes)))


@dataclass(frozen=True)
class Backbone(NetworkRecipe):
    """A ResNet up to global average pooling under one linear layer; the defaults are ResNet-20's.

    Attributes:
        widths: Channels of each stage.
        blocks: Residual blocks of each stage.
    """

    widths: tuple[int, ...] = (16, 32, 64)
    blocks: tuple[int, ...] = (3, 3, 3)

    def trunk(self, shape: Shape, generator: torch.Generator) -> ResNet:  # noqa: ARG002
        """Build a :class:`~splitfg.models.ResNet`."""
        from splitfg.models import ResNet

        return ResNet(widths=self.widths, blocks=self.blocks, generator=generator)

    def widths_from_h(self, shape: Shape) -> tuple[int]:  # noqa: ARG002
        """Return the width of h: the head is one linear layer."""
        return (self.widths[-1],)


@dataclass(frozen=True)
class FlatNetwork(NetworkRecipe):
    """Stem and first block of a backbone, flattened, under a large linear head; the defaults are CIFAR-10's.

    Attributes:
        width: Channels, the backbone's first width.
        inner: H of the two-layer head W₂(W₁ h + b₁) + b₂; ``None`` for a single linear layer.
    """

    width: int = 16
    inner: int | None = 64

    def __post_init__(self) -> None:
        raise_if(below(1, self, "width", "inner"))

    def trunk(self, shape: Shape, generator: torch.Generator) -> FlatTrunk:  # noqa: ARG002
        """Build a :class:`~splitfg.models.FlatTrunk`."""
        from splitfg.models import FlatTrunk

        return FlatTrunk(width=self.width, generator=generator)

    def widths_from_h(self, shape: Shape) -> tuple[int, ...]:
        """Return the width of h, and H if the head has two layers."""
        _, height, width = shape
        flat = self.width * height * width
        return (flat,) if self.inner is None else (flat, self.inner)


@dataclass(frozen=True)
class PlainMLP(NetworkRecipe):
    """A ReLU MLP over the flattened image, for the local rules.

    Attributes:
        widths: Widths of the hidden layers.
    """

    widths: tuple[int, ...] = (2000, 2000)

    def trunk(self, shape: Shape, generator: torch.Generator) -> MLP:
        """Build an :class:`~splitfg.models.MLP` over the pixels."""
        return self.over(math.prod(shape), generator)

    def over(self, features: int, generator: torch.Generator) -> MLP:
        """Build the MLP for this many inputs."""
        from splitfg.models import MLP

        return MLP(features, widths=self.widths, generator=generator)

    def widths_from_h(self, shape: Shape) -> tuple[int]:  # noqa: ARG002
        """Return the width of h: the head is one linear layer."""
        return (self.widths[-1],)


RESNET18 = Backbone((64, 128, 256, 512), (2, 2, 2, 2))
"""The paper's backbone for CIFAR-100."""

FLAT18 = FlatNetwork(64, 128)
"""The light trunk and head of ResNet-18."""
