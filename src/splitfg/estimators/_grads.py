"""Sums and norms of gradients keyed by name."""

from __future__ import annotations

import torch
from torch import Tensor

from splitfg.types import Params


def added(first: Params, second: Params) -> Params:
    """The sum of both, name by name; a name that only one has is taken as it is."""
    return {**first, **{n: first[n] + g if n in first else g for n, g in second.items()}}


def norm(grads: Params) -> Tensor:
    """The Euclidean norm over all entries together, summed in float32 or wider."""
    squares = [g.to(torch.promote_types(g.dtype, torch.float32)).square().sum() for g in grads.values()]
    return torch.stack(squares).sum().sqrt()
