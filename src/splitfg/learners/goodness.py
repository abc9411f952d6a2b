"""What Forward-Forward's layers compare: objectives on goodness, and how wrong labels are chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Objective(Protocol):
    """A layer's local loss on the goodness of positive and negative examples."""

    def __call__(self, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Per row: the loss and its derivatives by the positive and the negative goodness, each ``(B,)``."""


@dataclass(frozen=True)
class Threshold:
    """Hinton's objective: log(1 + e^{θ - g⁺}) + log(1 + e^{g⁻ - θ})."""

    theta: float = 1.0

    def __call__(self, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Positive goodness above θ, negative below."""
        loss = F.softplus(self.theta - positive) + F.softplus(negative - self.theta)
        return loss, -torch.sigmoid(self.theta - positive), torch.sigmoid(negative - self.theta)


@dataclass(frozen=True)
class Contrast:
    """The paired objective log(1 + e^{-s (g⁺ - g⁻)}) of Lee and Song, "SymBa" (2023).

    It asks only which of two labels of the same example has the higher goodness, which is what prediction
    asks too, and needs no threshold.
    """

    sharpness: float = 10.0

    def __call__(self, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Positive goodness above the negative one of the same row."""
        margin = self.sharpness * (positive - negative)
        slope = self.sharpness * torch.sigmoid(-margin)
        return F.softplus(-margin), -slope, slope


class Negatives(Protocol):
    """How wrong labels are chosen."""

    def __call__(self, y: Tensor, classes: int, goodness: Callable[[], Tensor], generator: torch.Generator) -> Tensor:
        """One wrong label per row, never the true one; ``goodness()`` gives the current ``(B, classes)``."""


@dataclass(frozen=True)
class UniformNegatives:
    """Any other class, all equally likely."""

    def __call__(
        self,
        y: Tensor,
        classes: int,
        goodness: Callable[[], Tensor],  # noqa: ARG002
        generator: torch.Generator,
    ) -> Tensor:
        """The true label moved on by 1 to ``classes - 1``, cyclically."""
        shift = torch.randint(1, classes, y.shape, generator=generator, device=y.device)
        return (y + shift) % classes


@dataclass(frozen=True)
class HardNegatives:
    """Another class c with probability softmax(sharpness · goodness), as the network would confuse them."""

    sharpness: float = 5.0

    def __call__(
        self,
        y: Tensor,
        classes: int,  # noqa: ARG002
        goodness: Callable[[], Tensor],
        generator: torch.Generator,
    ) -> Tensor:
        """Drawn after the true label's probability is set to zero; one prediction pass dearer."""
        scores = (self.sharpness * goodness()).scatter(1, y.unsqueeze(1), -torch.inf)
        return torch.multinomial(scores.softmax(dim=1), 1, generator=generator).squeeze(1)
