"""Slope and curvature of a head's loss along directions of h and of its parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.func import jvp

from splitfg.heads._base import Head
from splitfg.heads._linear import LinearHead
from splitfg.heads._output_loss import RowData
from splitfg.heads._tiles import row_slices
from splitfg.numerics import wide, widened
from splitfg.types import Params


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


@dataclass(frozen=True)
class HeadSlopes:
    """First and second derivatives of a head's loss along directions.

    Attributes:
        first: <u, a_g> for the directions a of h, shape ``(G,)``.
        second: ∂²L(h + s a_g + t a_h) / ∂s∂t, shape ``(G, G)``.
        own: <dL/dθ, q> for the direction q of the head's parameters, a scalar.
    """

    first: Tensor
    second: Tensor
    own: Tensor


def head_slopes(head: Head, h: Tensor, target: Tensor, moves: Tensor, own: Params | None = None) -> HeadSlopes:
    """Differentiate a head's loss along directions, at its current parameters.

    A linear head takes closed forms, in blocks, so that the logits of the whole batch never exist at once; other heads
    take forward mode, over forward mode for second derivatives.

    Args:
        head: The head.
        h: Representation, shape ``(..., d)``.
        target: Class indices ``(...)`` or values ``(..., C)``.
        moves: Directions a of h, shape ``(G, ..., d)``.
        own: A direction q of the head's parameters, by its own names; those it leaves out stay.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from splitfg import LinearHead
        >>> from splitfg.heads import head_slopes
        >>> h, y = torch.randn(16, 8), torch.randint(0, 3, (16,))
        >>> found = head_slopes(LinearHead(nn.Linear(8, 3)), h, y, torch.randn(2, 16, 8))
        >>> found.first.shape, found.second.shape
        (torch.Size([2]), torch.Size([2, 2]))
    """
    with torch.no_grad():
        if isinstance(head, LinearHead) and isinstance(head.output_loss, CurvedLoss):
            return _closed(head, head.output_loss, h, target, moves, own or {})
        return _by_forward_mode(head, h, target, moves, own or {})


def _closed(head: LinearHead, loss: CurvedLoss, h: Tensor, target: Tensor, moves: Tensor, own: Params) -> HeadSlopes:
    along = torch.zeros((), dtype=wide(h.dtype), device=h.device)
    if own:
        exact = head(h, target)
        u = exact.u
        along = along + sum((widened(g) * own[n]).sum() for n, g in exact.grads.items() if n in own)
    else:
        _, u = head.loss_and_u(h, target)
    first = (widened(u) * widened(moves)).flatten(1).sum(1)
    return HeadSlopes(first, _curvature(head, loss, h, target, moves), along)


def _curvature(head: LinearHead, loss: CurvedLoss, h: Tensor, target: Tensor, moves: Tensor) -> Tensor:
    params, width = head.params(), head.out_features
    weights = {name: p for name, p in params.items() if name.endswith("weight")}  # a direction has no bias
    normaliser, flat = head.normaliser(h, target), h.reshape(-1, h.shape[-1])
    labels, moved = head.output_loss.fold(target, width), moves.reshape(len(moves), *flat.shape)
    total = flat.new_zeros(len(moves), len(moves), dtype=wide(h.dtype))
    for part in row_slices(len(flat), max(1, head.block // width)):
        rows = head.output_loss.rows(labels[part], normaliser, width, wide(h.dtype))
        z, dz = head.outputs(params, flat[part]), head.outputs(weights, moved[:, part])
        total += loss.curvature(widened(z), widened(dz), rows)
    return total


def _by_forward_mode(head: Head, h: Tensor, target: Tensor, moves: Tensor, own: Params) -> HeadSlopes:
    normaliser, params = head.normaliser(h, target), head.params()
    zero = h.new_zeros(())

    def loss(a: Tensor, b: Tensor, s: Tensor, t: Tensor) -> Tensor:
        return head.loss(params, h + s * a + t * b, target, normaliser)

    def second(a: Tensor, b: Tensor) -> Tensor:
        return _slope(lambda t: _slope(lambda s: loss(a, b, s, t), zero), zero)

    along = torch.zeros((), dtype=wide(h.dtype), device=h.device)
    if own:
        along = _slope(
            lambda s: head.loss(
                {n: p + s * own[n] if n in own else p for n, p in params.items()}, h, target, normaliser
            ),
            zero,
        )
    first = torch.stack([_slope(lambda s, a=a: loss(a, a, s, zero), zero) for a in moves])  # type: ignore[misc]
    return HeadSlopes(first, torch.stack([torch.stack([second(a, b) for b in moves]) for a in moves]), along)


def _slope(function: Callable[[Tensor], Any], at: Tensor) -> Tensor:
    change: Tensor = jvp(function, (at,), (torch.ones_like(at),))[1]
    return change
