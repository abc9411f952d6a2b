"""Forward-Forward's local objectives on goodness, and its choice of wrong labels."""

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
        """Return the loss and its derivatives by the positive and the negative goodness, each ``(B,)``."""


@dataclass(frozen=True)
class Threshold:
    """Hinton's objective: log(1 + e^{θ - g⁺}) + log(1 + e^{g⁻ - θ})."""

    theta: float = 1.0

    def __call__(self, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss, which pushes positive goodness above θ and negative below, and its derivatives."""
        loss = F.softplus(self.theta - positive) + F.softplus(negative - self.theta)
        return loss, -torch.sigmoid(self.theta - positive), torch.sigmoid(negative - self.theta)


@dataclass(frozen=True)
class Contrast:
    """The paired objective log(1 + e^{-s (g⁺ - g⁻)}) of Lee and Song, "SymBa" (2023).

    Like the prediction, it depends on the difference between two labels of the same example only, and needs no
    threshold.
    """

    sharpness: float = 10.0

    def __call__(self, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss, which pushes positive goodness above that of the same row's wrong label, and derivatives."""
        margin = self.sharpness * (positive - negative)
        slope = self.sharpness * torch.sigmoid(-margin)
        return F.softplus(-margin), -slope, slope


class Negatives(Protocol):
    """Chooses a wrong label for every row."""

    def __call__(self, y: Tensor, classes: int, goodness: Callable[[], Tensor], generator: torch.Generator) -> Tensor:
        """Return one wrong label per row; ``goodness()`` computes the current goodness ``(B, classes)``."""


@dataclass(frozen=True)
class UniformNegatives:
    """Chooses among the other classes with equal probability."""

    def __call__(
        self,
        y: Tensor,
        classes: int,
        goodness: Callable[[], Tensor],  # noqa: ARG002
        generator: torch.Generator,
    ) -> Tensor:
        """Shift the true label cyclically by 1 to ``classes - 1``."""
        shift = torch.randint(1, classes, y.shape, generator=generator, device=y.device)
        return (y + shift) % classes


@dataclass(frozen=True)
class HardNegatives:
    """Chooses another class c with probability softmax(sharpness · goodness): the network's likely confusions.

    Takes one prediction pass more than :class:`UniformNegatives`.
    """

    sharpness: float = 5.0

    def __call__(
        self,
        y: Tensor,
        classes: int,  # noqa: ARG002
        goodness: Callable[[], Tensor],
        generator: torch.Generator,
    ) -> Tensor:
        """Draw a label after setting the true label's probability to zero."""
        scores = (self.sharpness * goodness()).scatter(1, y.unsqueeze(1), -torch.inf)
        return torch.multinomial(scores.softmax(dim=1), 1, generator=generator).squeeze(1)
