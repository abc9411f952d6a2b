"""Validation loss over all validation windows."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from splitfg import Split
from splitfg_lab.data import Windows
from splitfg_lab.experiments._training import evaluation_phase
from splitfg_lab.runs import RunContext

_WINDOWS_AT_ONCE = 32
_ROWS_AT_ONCE = 256


class Validation:
    """Mean negative log-likelihood over all complete windows, with the logits of a few hundred rows at a time.

    Args:
        windows: The validation windows.
        device: The device of the network.
        run: Shows a progress bar for each pass and interrupts it on Ctrl-C; ``None`` does neither.
    """

    def __init__(self, windows: Windows, device: torch.device, run: RunContext | None = None) -> None:
        self._batches = [(x.to(device), y.to(device)) for x, y in windows.sweep(_WINDOWS_AT_ONCE)]
        self._targets = len(windows) * windows.length
        self._run = run

    @torch.no_grad()
    def nll(self, split: Split) -> float:
        """Compute the loss in nats per token."""
        total = torch.zeros((), dtype=torch.float64, device=self._batches[0][0].device)
        parts = sum(math.ceil(y.numel() / _ROWS_AT_ONCE) for _, y in self._batches)
        with evaluation_phase(self._run, "validation", parts) as advance:
            for x, y in self._batches:
                h, targets = split.h(x).flatten(0, 1), y.flatten()
                for rows, wanted in zip(h.split(_ROWS_AT_ONCE), targets.split(_ROWS_AT_ONCE), strict=True):
                    total += F.cross_entropy(split.head.predict(rows), wanted, reduction="sum")
                    advance()
        return (total / self._targets).item()


def perplexity(nll: float) -> float:
    """Return exp(NLL), infinite if that does not fit a float."""
    return math.exp(nll) if nll < 700 else math.inf
