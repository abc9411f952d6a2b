"""Gradients in memory of their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor


def each_its_own(grads: Iterable[Tensor]) -> Iterator[Tensor]:
    """Every gradient dense and in memory of its own, so that it can be changed in place.

    Autograd hands on one tensor for both terms of a sum, and expands what is summed over.
    """
    seen: set[int] = set()
    for g in (g.to_dense() if g.is_sparse else g for g in grads):
        start = g.untyped_storage().data_ptr()
        shared = start in seen or g.untyped_storage().nbytes() < g.numel() * g.element_size()
        seen.add(start)
        yield g.clone(memory_format=torch.contiguous_format) if shared else g
