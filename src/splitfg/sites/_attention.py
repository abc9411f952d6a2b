"""The attention weights of a recorded pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from splitfg.errors import SplitError
from splitfg.sites._block_path import BlockPath, PathBlock
from splitfg.sites._blocks import BlockInput, block_inputs, run_block
from splitfg.sites._path import ResidualPath
from splitfg.sites._recorder import Recording

_HOOK = """
    def attention_weights(self, x, ...):  # the arguments of forward
        return weights  # (B, heads, T, T): row t has the weights of the tokens that t attends to"""


@runtime_checkable
class AttentionLayer(Protocol):
    """A module that returns the weights of its attention."""

    def attention_weights(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the weights ``(B, heads, T, T)`` for the arguments of ``forward``; rows are those of queries."""


def attention_layers(trunk: nn.Module) -> tuple[str, ...]:
    """Return the names of the trunk's modules with ``attention_weights``.

    Raises:
        SplitError: There are none.
    """
    found = tuple(name for name, module in trunk.named_modules() if isinstance(module, AttentionLayer))
    if not found:
        raise SplitError([f"no module of the trunk returns attention weights: give its attention layers{_HOOK}"])
    return found


def attention_above_writers(trunk: nn.Module, path: ResidualPath, seen: Recording) -> dict[str, Tensor]:
    """Return the weights of all attention that reads the stream after every writer, by writer.

    Args:
        trunk: The trunk.
        path: Its stream.
        seen: A pass in which inputs and further arguments of :func:`attention_layers` were recorded.

    Raises:
        SplitError: An attention layer has no writer of the path, or is called more than once.
    """
    found, problems = [], []
    for name in attention_layers(trunk):
        own = [i for i, writer in enumerate(path.writers) if writer.startswith(f"{name}.")]
        if not own or len(seen.reads.get(name, ())) != 1:
            problems.append(f"{name} must have a writer of the path inside it, and be called once: use MeanJacobian()")
            continue
        args, kwargs = seen.further[name][0]
        found.append((own[0], _weights(trunk, name, seen.reads[name][0], args, kwargs)))
    if problems:
        raise SplitError(problems)
    return _above(path.writers, found)


def attention_above_blocks(trunk: nn.Module, path: BlockPath, seen: Recording) -> dict[str, Tensor]:
    """Return the weights of all attention above every point of a block path, by the module that writes the point."""
    layers, bottom = attention_layers(trunk), path.writers[:1]
    points = (*bottom, *(block.name for block in path.blocks[:-1]))
    found = [
        (i + len(bottom), _of_block(trunk, given))
        for i, given in enumerate(block_inputs(path, seen))
        if given.block.name in layers
    ]
    if not found:
        raise SplitError([f"no block of the path ends in one of {', '.join(layers)}: use MeanJacobian()"])
    return _above(points, found)


def _of_block(trunk: nn.Module, given: BlockInput) -> Tensor:
    *before, name = given.block.modules
    x = run_block(trunk, PathBlock(tuple(before)), {}, given.x, given.further[:-1]) if before else given.x
    args, kwargs = given.further[-1]
    return _weights(trunk, name, x, args, kwargs)


def _weights(trunk: nn.Module, name: str, x: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    module = trunk.get_submodule(name)
    assert isinstance(module, AttentionLayer)
    return module.attention_weights(x, *args, **kwargs)


def _above(points: Sequence[str], found: Sequence[tuple[int, Tensor]]) -> dict[str, Tensor]:
    """Join the heads above every point; a layer with the number k reads the points before k."""
    none = found[0][1][:, :0]
    return {
        point: torch.cat([none, *(weights for k, weights in found if k > i)], dim=1) for i, point in enumerate(points)
    }
