"""A model class to test, and the batch that it is tested on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from splitfg import Split, split

Batch: TypeAlias = Mapping[str, Any] | tuple[Any, Tensor]
"""A dict with labels, or inputs and target."""

Built: TypeAlias = tuple[nn.Module, Batch]


def _split(model: nn.Module) -> Split:
    return split(model, tied="include")


@dataclass(frozen=True)
class Case:
    """A model class with random weights.

    Attributes:
        library: Where the class comes from: ``torch``, ``splitfg``, ``transformers``, ``peft`` or ``timm``.
        name: The class, and settings that matter.
        build: Makes the model and a batch; draws from torch's global generator.
        train: Whether the model stays in training mode.
        cut: Splits the model.
    """

    library: str
    name: str
    build: Callable[[], Built]
    train: bool = False
    cut: Callable[[nn.Module], Split] = _split

    def made(self, seed: int = 0) -> Built:
        """Build the model and its batch from a seed; the global generator stays as it was."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model, batch = self.build()
        return model.train(self.train), batch
