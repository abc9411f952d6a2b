"""Blocks with a skip that is not a plain sum: y = a(s(x) + f(x))."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from splitfg.sites._block_path import BlockPath, PathBlock
from splitfg.sites._blocks import BlockInput
from splitfg.splitting import original

_HOOK = """
    def skip_back(self, x, y, delta):  # x: the block's input, y: its output, delta = dL/dy
        return delta * (y > 0)  # for y = relu(x + f(x)): the share of dL/dx that does not pass through f"""


@runtime_checkable
class SkipBlock(Protocol):
    """A block y = a(s(x) + f(x)) that knows how a gradient passes along its skip."""

    def skip_back(self, x: Tensor, y: Tensor, delta: Tensor) -> Tensor:
        """Return (∂y/∂x)ᵀ δ with f(x) held constant: the share of dL/dx that does not pass through f.

        Args:
            x: The block's input.
            y: Its output.
            delta: δ = dL/dy.
        """


def has_skip(trunk: nn.Module, block: PathBlock) -> bool:
    """Whether a block is one module with ``skip_back``."""
    return len(block.modules) == 1 and isinstance(original(trunk.get_submodule(block.name)), SkipBlock)


def skip_back(trunk: nn.Module, given: BlockInput, y: Tensor, delta: Tensor) -> Tensor:
    """Return the share of dL/dx that passes along a block's skip, from δ = dL/dy; zeros without a skip."""
    module = original(trunk.get_submodule(given.block.name))
    if not has_skip(trunk, given.block):
        return given.x.new_zeros(given.x.shape)
    assert isinstance(module, SkipBlock)
    return module.skip_back(given.x, y, delta)


def skip_problems(trunk: nn.Module, path: BlockPath, *, all_of_them: bool) -> list[str]:
    """List the problems of carrying gradients along the skips of a path.

    Args:
        trunk: The path's trunk.
        path: The blocks.
        all_of_them: Whether every block but the first needs a skip, because nothing else predicts gradients below it.
    """
    if path.residual:
        return ["a residual path carries gradients along its skips as it is: use skips=False"]
    missing = [block.name for block in path.blocks[1:] if not has_skip(trunk, block)]
    if all_of_them and missing:
        words = f"{', '.join(missing)} carry no gradient along a skip, and r is the only prediction"
        return [f"{words}: use feedback=MeanJacobian(), or give these modules{_HOOK}"]
    if len(missing) == len(path.blocks) - 1:
        return [f"no block of the path has a skip: use skips=False, or give the modules{_HOOK}"]
    return []
