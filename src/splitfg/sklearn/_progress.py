"""Progress of a fit, printed line by line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ProgressLines:
    """Prints the mean loss, and the last validation score if there is one, every ``every`` steps and at the end.

    Attributes:
        steps: Steps in all.
        every: Steps between lines.
        score: Name of the validation score.
    """

    steps: int
    every: int
    score: str = "score"

    def __call__(self, losses: Sequence[Tensor], scores: Sequence[float]) -> None:
        """Print a line if one is due after this many losses."""
        step = len(losses)
        if step % self.every and step != self.steps:
            return
        recent = losses[-((step - 1) % self.every + 1) :]
        scored = f", validation {self.score} {scores[-1]:.4f}" if scores else ""
        print(f"step {step}/{self.steps}: loss {torch.stack(list(recent)).mean().item():.4f}{scored}", flush=True)
