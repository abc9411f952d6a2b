"""Blocks whose graphs are kept from the forward pass until they are pulled."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from splitfg.sites import BlockInput, PathBlock, Pulled, block_params, pulled_names, run_block, tapped


class KeptBlock:
    """The graphs of one block on all micro-batches.

    They share the leaves of the block's parameters, so that one reverse pass sums the gradients of all micro-batches in
    place.

    Args:
        trunk: Owner of the block.
        block: The block.
        to_input: Whether pulls reach the block's input.
    """

    def __init__(self, trunk: nn.Module, block: PathBlock, *, to_input: bool) -> None:
        self._trunk, self._block, self._to_input = trunk, block, to_input
        self._params = block_params(trunk, block)
        self._leaves = {n: self._params[n].detach().requires_grad_() for n in pulled_names(trunk, block)}
        self._inputs: list[Tensor] = []
        self._outputs: list[Tensor] = []
        self._reads: list[Tensor] = []

    def run(self, given: BlockInput) -> Tensor:
        """Run the block on one micro-batch, keep its graph, and return its output, detached."""
        tap = () if self._block.writer is None else (self._block.writer,)
        x = given.x.detach().requires_grad_() if self._to_input else given.x.detach()
        with torch.enable_grad(), tapped(self._trunk, tap, lambda _name, a, _z: self._reads.append(a.detach())):
            y = run_block(self._trunk, self._block, {**self._params, **self._leaves}, x, given.further)
        self._inputs.append(x)
        self._outputs.append(y)
        return y.detach()

    def pull(self, delta: Tensor, *, last: bool) -> Pulled:
        """Pull a gradient at the outputs of all rows back; ``last`` frees the graphs."""
        leaves, inputs = list(self._leaves.values()), self._inputs if self._to_input else []
        read = torch.cat(self._reads) if self._reads else None
        if not (leaves or inputs):
            return Pulled([], {}, read)
        found = torch.autograd.grad(
            self._outputs,
            [*leaves, *inputs],
            delta.split([len(x) for x in self._inputs]),
            retain_graph=not last,
            allow_unused=True,
            materialize_grads=True,
        )
        shares = [torch.cat(found[len(leaves) :])] if inputs else []
        return Pulled(shares, dict(zip(self._leaves, found, strict=False)), read)
