"""Slope and curvature of a head's loss along directions of h."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.func import jvp

from splitfg.heads._base import Head
from splitfg.heads._linear import LinearHead
from splitfg.heads._output_loss import RowData
from splitfg.heads._tiles import slices
from splitfg.numerics import inner_products, wide, widened


@runtime_checkable
class CurvedLoss(Protocol):
    """A loss on outputs that computes its second derivatives in closed form."""

    def curvature(self, outputs: Tensor, moves: Tensor, rows: RowData) -> Tensor:
        """Compute C_gh = Σ_n dz_gnᵀ (∂²L/∂z_n²) dz_hn, shape ``(G, G)``.

        Args:
            outputs: z, shape ``(n, C)``.
            moves: dz, shape ``(G, n, C)``.
            rows: From :meth:`OutputLoss.rows`.
        """


def head_slopes(head: Head, h: Tensor, target: Tensor, moves: Tensor) -> tuple[Tensor, Tensor]:
    """Compute first and second derivatives of a head's loss along G directions a of h, at its current parameters.

    A linear head takes closed forms, in blocks, so that the logits of the whole batch never exist at once; other heads
    take forward mode, over forward mode for second derivatives.

    Args:
        head: The head.
        h: Representation, shape ``(..., d)``.
        target: Class indices ``(...)`` or values ``(..., C)``.
        moves: Directions a, shape ``(G, ..., d)``.

    Returns:
        <u, a_g>, shape ``(G,)``, and ∂²L(h + s a_g + t a_h) / ∂s∂t, shape ``(G, G)``.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from splitfg import LinearHead
        >>> from splitfg.heads import head_slopes
        >>> h, y = torch.randn(16, 8), torch.randint(0, 3, (16,))
        >>> first, second = head_slopes(LinearHead(nn.Linear(8, 3)), h, y, torch.randn(2, 16, 8))
        >>> first.shape, second.shape
        (torch.Size([2]), torch.Size([2, 2]))
    """
    with torch.no_grad():
        if isinstance(head, LinearHead) and isinstance(head.output_loss, CurvedLoss):
            _, u = head.loss_and_u(h, target)
            return inner_products(moves, u), _curvature(head, head.output_loss, h, target, moves)
        return _by_forward_mode(head, h, target, moves)


def _curvature(head: LinearHead, loss: CurvedLoss, h: Tensor, target: Tensor, moves: Tensor) -> Tensor:
    params, width = head.params(), head.out_features
    weights = {name: p for name, p in params.items() if name.endswith("weight")}  # a direction has no bias
    normaliser, flat = head.normaliser(h, target), h.reshape(-1, h.shape[-1])
    labels, moved = head.output_loss.fold(target, width), moves.reshape(len(moves), *flat.shape)
    total = flat.new_zeros(len(moves), len(moves), dtype=wide(h.dtype))
    for part in slices(len(flat), max(1, head.block // (width * len(moves)))):
        rows = head.output_loss.rows(labels[part], normaliser, width, wide(h.dtype))
        z, dz = head.outputs(params, flat[part]), head.outputs(weights, moved[:, part])
        total += loss.curvature(widened(z), widened(dz), rows)
    return total


def _by_forward_mode(head: Head, h: Tensor, target: Tensor, moves: Tensor) -> tuple[Tensor, Tensor]:
    normaliser, params = head.normaliser(h, target), head.params()
    zero = h.new_zeros(())

    def loss(a: Tensor, b: Tensor, s: Tensor, t: Tensor) -> Tensor:
        return head.loss(params, h + s * a + t * b, target, normaliser)

    def first(a: Tensor) -> Tensor:
        return _slope(lambda s: loss(a, a, s, zero), zero)

    def second(a: Tensor, b: Tensor) -> Tensor:
        return _slope(lambda t: _slope(lambda s: loss(a, b, s, t), zero), zero)

    pairs = torch.stack([torch.stack([second(a, b) for b in moves]) for a in moves])
    return torch.stack([first(a) for a in moves]), pairs


def _slope(function: Callable[[Tensor], Any], at: Tensor) -> Tensor:
    change: Tensor = jvp(function, (at,), (torch.ones_like(at),))[1]
    return change
