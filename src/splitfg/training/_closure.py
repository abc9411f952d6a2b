"""Closures of ``torch.optim``: functions that compute the loss and its gradient again."""

from __future__ import annotations

from collections.abc import Callable

import torch


def evaluated(closure: Callable[[], float] | None) -> float | None:
    """Return the loss of an optimizer's closure, with gradients enabled; ``None`` without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
