"""Reverse mode inside one block of a trunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from splitfg.sites._block_path import PathBlock
from splitfg.sites._blocks import BlockInput, Further, block_params, pulled_names, run_block
from splitfg.sites._taps import tapped
from splitfg.splitting import explained_reverse
from splitfg.types import Params


@dataclass(frozen=True)
class Pulled:
    """Gradients of one block.

    Attributes:
        shares: (∂f/∂x)ᵀ δ for every δ; empty if the block's input needs no gradient.
        grads: (∂f/∂θ)ᵀ δ for the last δ, by the trunk's names, without the writer's.
        read: The input of the block's writer; ``None`` without one.
    """

    shares: Sequence[Tensor]
    grads: Params
    read: Tensor | None


class Puller(Protocol):
    """Pulls gradients back through one block, whose inside is computed again."""

    def __call__(self, trunk: nn.Module, given: BlockInput, deltas: Sequence[Tensor], *, to_input: bool) -> Pulled:
        """Pull gradients at a block's output back to its input and parameters.

        Args:
            trunk: The block's owner.
            given: The block and its input.
            deltas: Gradients at the output; the last one gives the parameters' gradients.
            to_input: Whether the input's gradient is wanted.
        """


def pull_block(trunk: nn.Module, given: BlockInput, deltas: Sequence[Tensor], *, to_input: bool) -> Pulled:
    """Pull gradients back through one block in eager code; see :class:`Puller`.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from splitfg.sites import BlockInput, PathBlock, pull_block
        >>> trunk = nn.Sequential(nn.Linear(4, 3))
        >>> given = BlockInput(PathBlock(("0",)), torch.randn(2, 4), [((), {})])
        >>> pull_block(trunk, given, [torch.ones(2, 3)], to_input=True).shares[0].shape
        torch.Size([2, 4])
    """
    params, names = block_params(trunk, given.block), pulled_names(trunk, given.block)
    return pull_with(trunk, given.block, params, names, given.x, given.further, deltas, to_input=to_input)


def pull_with(
    trunk: nn.Module,
    block: PathBlock,
    params: Params,
    names: Sequence[str],
    x: Tensor,
    further: Further,
    deltas: Sequence[Tensor],
    *,
    to_input: bool,
) -> Pulled:
    """Pull gradients back through a block with these parameters: a pure function of tensors, which compilers trace.

    ``names`` are the parameters whose gradients are wanted.
    """
    tap = () if block.writer is None else (block.writer,)
    reads: list[Tensor] = []
    with torch.enable_grad():
        leaves = {name: params[name].detach().requires_grad_() for name in names}
        x = x.detach().requires_grad_() if to_input else x.detach()
        with tapped(trunk, tap, lambda _name, a, _z: reads.append(a.detach())):
            y = run_block(trunk, block, {**params, **leaves}, x, further)
    shares = [_grads(y, [x], delta)[0] for delta in deltas[:-1]] if to_input else []
    wanted = [*leaves.values(), *([x] if to_input else [])]
    found = _grads(y, wanted, deltas[-1], last=True)
    last = [found.pop()] if to_input else []
    return Pulled([*shares, *last], dict(zip(names, found, strict=True)), reads[0] if reads else None)


def _grads(y: Tensor, wanted: Sequence[Tensor], delta: Tensor, *, last: bool = False) -> list[Tensor]:
    if not wanted:
        return []
    keep = not last
    with explained_reverse():
        return list(torch.autograd.grad(y, wanted, delta, retain_graph=keep, allow_unused=True, materialize_grads=True))
