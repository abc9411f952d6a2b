"""Validate the inside of a block: which parameters its output depends on, and the closed form of its writer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from splitfg.errors import shorten
from splitfg.numerics import close
from splitfg.sites._block_path import PathBlock
from splitfg.sites._blocks import Further, block_params, run_block
from splitfg.sites._layers import layer_gradients
from splitfg.sites._taps import tapped
from splitfg.splitting import explained_reverse
from splitfg.types import Params


def side_problems(trunk: nn.Module, block: PathBlock, x: Tensor, y: Tensor) -> list[str]:
    """List other modules' parameters that a block's output y depends on, but not through its input x.

    A value that an earlier block stores in an attribute or in an object reaches y past x; a pull of the block by
    itself would lose its gradient.
    """
    own = {id(p) for name in block.modules for p in trunk.get_submodule(name).parameters()}
    reached = _parameters_above(y, x) - own
    others = [name for name, p in reversed(list(trunk.named_parameters())) if id(p) in reached]
    if not others:
        return []
    return [
        f"the output of {block.name} depends on {shorten(others)} past the block's input, as with a value that an"
        " earlier block stores: pass it along the stream, or make one block of all modules between"
    ]


def _parameters_above(y: Tensor, x: Tensor) -> set[int]:
    """Return the ids of the leaves that y depends on, but not through x."""
    found, done, todo = set[int](), set(), [y.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node is x.grad_fn or node in done:
            continue
        done.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        todo += [above for above, _ in node.next_functions]
    return found


def writer_problems(trunk: nn.Module, block: PathBlock, x: Tensor, further: Further) -> list[str]:
    """Compare the closed form of a writer's gradients with autograd inside its block."""
    if block.writer is None:
        return []
    layer = trunk.get_submodule(block.writer)
    leaves = {id(p): p.detach().clone().requires_grad_() for p in layer.parameters()}
    reads: list[Tensor] = []
    with torch.enable_grad(), tapped(trunk, (block.writer,), lambda _name, a, _z: reads.append(a.detach())):
        y = run_block(trunk, block, _with_leaves(trunk, block, leaves), x.detach(), further)
        if not y.requires_grad:
            return []
        delta = torch.randn(y.shape, generator=torch.Generator().manual_seed(0)).to(y)
        with explained_reverse():
            found = torch.autograd.grad(y, list(leaves.values()), delta, allow_unused=True, materialize_grads=True)
    expected, closed = dict(zip(leaves, found, strict=True)), layer_gradients(layer, reads[0], delta)
    if all(close(closed[name], expected[id(p)]) for name, p in layer.named_parameters()):
        return []
    return [
        f"the gradients of {block.writer} are not those of a layer that writes the output of {block.name} once: its"
        " output is changed in place, it is called twice, or its parameters are used elsewhere in the block. Leave"
        " writer out"
    ]


def _with_leaves(trunk: nn.Module, block: PathBlock, leaves: dict[int, Tensor]) -> Params:
    """Return a block's parameters, with leaves in place of some of them."""
    own = {name: p for name, p in trunk.named_parameters(remove_duplicate=False) if id(p) in leaves}
    params = block_params(trunk, block)
    return {name: leaves[id(own[name])] if name in own else p for name, p in params.items()}
