"""Arithmetic on tensors and on gradients keyed by name that several packages need."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from splitfg.types import Params


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return float32, or ``dtype`` where that is wider: the dtype in which many numbers are summed."""
    return torch.promote_types(dtype, torch.float32)


def widened(x: Tensor) -> Tensor:
    """Return ``x`` in float32 at least."""
    return x.to(wide(x.dtype))


def added(first: Params, second: Params) -> Params:
    """Add two sets of gradients name by name; a name that occurs in one of them is copied unchanged."""
    return {**first, **{n: first[n] + g if n in first else g for n, g in second.items()}}


def norm(grads: Params, *, like: Tensor | None = None) -> Tensor:
    """Compute the Euclidean norm over all entries together, summed in float32 or wider.

    Args:
        grads: Tensors keyed by name.
        like: Its device holds the zero that is returned for empty ``grads``.
    """
    if not grads:
        return torch.zeros(()) if like is None else torch.zeros((), device=like.device)
    values = list(grads.values())
    # one launch for many parameters, and no squares of them in memory
    each = torch._foreach_norm(values, 2, dtype=wide(values[0].dtype))
    norms: Tensor = torch.linalg.vector_norm(torch.stack(each))
    return norms


def each_its_own(grads: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield every gradient dense and in memory of its own, so that callers may change it in place.

    Autograd returns one tensor for both terms of a sum, and expanded tensors for what is summed over.
    """
    seen: set[int] = set()
    for g in (g.to_dense() if g.is_sparse else g for g in grads):
        start = g.untyped_storage().data_ptr()
        shared = start in seen or g.untyped_storage().nbytes() < g.numel() * g.element_size()
        seen.add(start)
        yield g.clone(memory_format=torch.contiguous_format) if shared else g
