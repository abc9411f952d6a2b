"""The full pass over the validation windows, and how far the trunk has moved."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from splitfg import Split
from splitfg_lab.data import Windows

_WINDOWS_AT_ONCE = 32
_ROWS_AT_ONCE = 256


class Validation:
    """Mean negative log-likelihood over all complete windows; logits exist for a few hundred rows at a time.

    Args:
        windows: The validation windows.
        device: Where the network is.
    """

    def __init__(self, windows: Windows, device: torch.device) -> None:
        self._batches = [(x.to(device), y.to(device)) for x, y in windows.sweep(_WINDOWS_AT_ONCE)]
        self._targets = len(windows) * windows.length

    @torch.no_grad()
    def nll(self, split: Split) -> float:
        """In nats per token."""
        total = torch.zeros((), dtype=torch.float64, device=self._batches[0][0].device)
        for x, y in self._batches:
            h, targets = split.h(x).flatten(0, 1), y.flatten()
            for rows, wanted in zip(h.split(_ROWS_AT_ONCE), targets.split(_ROWS_AT_ONCE), strict=True):
                total += F.cross_entropy(split.head.predict(rows), wanted, reduction="sum")
        return (total / self._targets).item()


def perplexity(nll: float) -> float:
    """exp(NLL); infinite where that is too large for a float."""
    return math.exp(nll) if nll < 700 else math.inf
