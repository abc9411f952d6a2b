"""Blocks whose graphs are kept from the forward pass until they are pulled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor, nn

from splitfg.numerics import added
from splitfg.sites import BlockInput, Pulled, block_params, pulled_names, run_block, tapped
from splitfg.types import Params


@dataclass(frozen=True)
class KeptBlock:
    """The graph of one block on one micro-batch.

    Attributes:
        x: The input, detached from the block before.
        y: The output.
        leaves: The parameters that are pulled, by the trunk's names.
        read: The input of the block's writer; ``None`` without one.
    """

    x: Tensor
    y: Tensor
    leaves: Params
    read: Tensor | None

    def pull(self, delta: Tensor, *, to_input: bool) -> Pulled:
        """Pull a gradient at the output back; the graph stays for further pulls."""
        wanted = [*self.leaves.values(), *([self.x] if to_input else [])]
        options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
        found = list(torch.autograd.grad(self.y, wanted, delta, **options)) if wanted else []
        shares = [found.pop()] if to_input else []
        return Pulled(shares, dict(zip(self.leaves, found, strict=True)), self.read)


def keep_block(trunk: nn.Module, given: BlockInput, *, to_input: bool) -> KeptBlock:
    """Run a block and keep its graph."""
    reads: list[Tensor] = []
    tap = () if given.block.writer is None else (given.block.writer,)
    params = block_params(trunk, given.block)
    with torch.enable_grad():
        leaves = {name: params[name].detach().requires_grad_() for name in pulled_names(trunk, given.block)}
        x = given.x.detach().requires_grad_() if to_input else given.x.detach()
        with tapped(trunk, tap, lambda _name, a, _z: reads.append(a.detach())):
            y = run_block(trunk, given.block, {**params, **leaves}, x, given.further)
    return KeptBlock(x, y, leaves, reads[0] if reads else None)


def pull_kept(parts: Sequence[KeptBlock], delta: Tensor, *, to_input: bool) -> Pulled:
    """Pull a block on all micro-batches: shares are joined, gradients summed."""
    deltas = delta.split([len(part.x) for part in parts])
    found = [part.pull(own, to_input=to_input) for part, own in zip(parts, deltas, strict=True)]
    shares = [torch.cat([one.shares[0] for one in found])] if to_input else []
    reads = [one.read for one in found if one.read is not None]
    return Pulled(shares, reduce(added, [one.grads for one in found]), torch.cat(reads) if reads else None)
