"""Sums and norms of gradients keyed by name."""

from __future__ import annotations

import torch
from torch import Tensor

from splitfg.types import Params


def added(first: Params, second: Params) -> Params:
    """The sum of both, name by name; a name that only one has is taken as it is."""
    return {**first, **{n: first[n] + g if n in first else g for n, g in second.items()}}


def norm(grads: Params, *, like: Tensor | None = None) -> Tensor:
    """The Euclidean norm over all entries together, summed in float32 or wider.

    That of no entries at all is a zero, on the device of ``like``.
    """
    if not grads:
        return torch.zeros(()) if like is None else torch.zeros((), device=like.device)
    values = list(grads.values())
    wide = torch.promote_types(values[0].dtype, torch.float32)
    # one launch for many parameters, and no squares of them in memory
    norms: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(values, 2, dtype=wide)))
    return norms
