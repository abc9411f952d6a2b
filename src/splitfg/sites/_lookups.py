"""The gradient of a table at the rows that were looked up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class TableRows:
    """The gradient of a table that is zero outside some of its rows, without memory for the others.

    Attributes:
        ids: Row of every lookup, ``(n,)``.
        values: Gradients to add to these rows, ``(n, d)``: the sum over all lookups of a row at the first of them, and
            zero at the others.
    """

    ids: Tensor
    values: Tensor

    def add_to(self, table: Tensor) -> None:
        """Add the gradient to that of the whole table, in place."""
        # no two numbers other than zero for one row, so that the order of the sum does not matter
        table.index_add_(0, self.ids, self.values)


def looks_up_few(module: nn.Module, a: Tensor, delta: Tensor) -> TypeGuard[nn.Embedding]:
    """Whether a module is a table with more rows than it looks up, whose gradient has its dtype."""
    return type(module) is nn.Embedding and a.numel() < module.num_embeddings and module.weight.dtype == delta.dtype


def lookup_gradient(module: nn.Embedding, a: Tensor, delta: Tensor) -> TableRows:
    """Return :func:`~splitfg.sites.layer_gradients` of an ``nn.Embedding``, at the rows looked up alone.

    Args:
        module: The table.
        a: Row numbers.
        delta: dL/d(output).

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from splitfg.sites import lookup_gradient
        >>> rows = lookup_gradient(nn.Embedding(1000, 2), torch.tensor([7, 3, 7]), torch.ones(3, 2))
        >>> rows.ids, rows.values
        (tensor([7, 3, 7]), tensor([[2., 2.],
                [1., 1.],
                [0., 0.]]))
    """
    ids = a.reshape(-1).long()
    count = len(ids)
    place = torch.arange(count, device=ids.device)
    # the first lookup of every row; shapes do not depend on the values, so that a CUDA graph can capture this
    first = place.new_zeros(module.num_embeddings).scatter_reduce_(0, ids, place, "amin", include_self=False)[ids]
    rows = delta.reshape(count, -1)
    if module.padding_idx is not None:
        rows = rows.masked_fill((ids == module.padding_idx).unsqueeze(1), 0)
    values = torch.ops.aten.embedding_dense_backward(rows, first, count, -1, module.scale_grad_by_freq)
    return TableRows(ids, values)
