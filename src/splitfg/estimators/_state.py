"""The state that forward passes update, once for every estimate."""

from __future__ import annotations

from dataclasses import replace

from splitfg.splitting import Batch, Split
from splitfg.types import Estimate


def with_state(split: Split, batch: Batch, estimate: Estimate) -> Estimate:
    """Add the change that one forward pass makes in buffers and attributes, such as running statistics.

    Runs the network once more, in a training mode where it changes its state; otherwise returns the estimate.
    """
    change = split.forward_state(x for x, _ in batch)
    return estimate if change is None else replace(estimate, forward_state=change)
