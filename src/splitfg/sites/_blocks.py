"""Running one block of a trunk by itself."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from splitfg.calling import RandomState, call, places_of, random_state
from splitfg.sites._block_path import BlockPath, PathBlock
from splitfg.sites._recorder import Recording, TapPoints
from splitfg.sites._taps import Arguments
from splitfg.types import Params

Further: TypeAlias = Sequence[Arguments]
"""Further arguments of a block's modules, one entry for each."""


@dataclass(frozen=True)
class BlockInput:
    """The input of one block in a recorded pass.

    Attributes:
        block: The block.
        x: Its input x_i.
        further: Arguments of its modules after the first.
    """

    block: PathBlock
    x: Tensor
    further: Further


@contextmanager
def entries(trunk: nn.Module, path: BlockPath) -> Iterator[dict[str, list[RandomState]]]:
    """Record the state of torch's global generators whenever a block's first module is called, by its name.

    A block that runs again from that state draws the same dropout masks.
    """
    found: dict[str, list[RandomState]] = defaultdict(list)
    names = dict.fromkeys(block.modules[0] for block in path.blocks)
    handles = [
        trunk.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: found[name].append(random_state()))
        for name in names
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def block_states(path: BlockPath, found: Mapping[str, Sequence[RandomState]]) -> list[RandomState]:
    """Return the state at the entry of every block, in order."""
    calls: Counter[str] = Counter()
    states = []
    for block in path.blocks:
        states.append(found[block.modules[0]][calls[block.modules[0]]])
        calls.update(block.modules)
    return states


def block_points(path: BlockPath, moved: tuple[str, ...] = ()) -> TapPoints:
    """Return the modules to tap so that :func:`block_inputs` finds the inputs of all blocks."""
    top = (path.blocks[-1].name,) if path.top is None else (path.top,)
    first = tuple(block.modules[0] for block in path.blocks)
    called = tuple(dict.fromkeys(name for block in path.blocks for name in block.modules))
    return TapPoints(tuple(dict.fromkeys((*path.writers, *first, *top))), moved, path.top, called, path.pooled)


def block_inputs(path: BlockPath, seen: Recording) -> list[BlockInput]:
    """Return the input of every block of a recorded pass, in order."""
    calls: Counter[str] = Counter()
    found = []
    for block in path.blocks:
        further = []
        x = seen.reads[block.modules[0]][calls[block.modules[0]]]
        for name in block.modules:
            further.append(seen.further[name][calls[name]])
            calls[name] += 1
        found.append(BlockInput(block, x, further))
    return found


def top_shape(path: BlockPath, seen: Recording) -> torch.Size:
    """Return the shape of x_L in a recorded pass; h may be flattened."""
    if path.top is not None:
        return seen.reads[path.top][0].shape
    return seen.wrote[path.blocks[-1].name][-1]


def block_params(trunk: nn.Module, block: PathBlock) -> Params:
    """Return all parameters of a block, by the trunk's names."""
    return {
        f"{name}.{inner}": p.detach()
        for name in block.modules
        for inner, p in trunk.get_submodule(name).named_parameters()
    }


def pulled_names(trunk: nn.Module, block: PathBlock) -> tuple[str, ...]:
    """Return the names of a block's trained parameters, without those of its writer."""
    writer = () if block.writer is None else trunk.get_submodule(block.writer).parameters()
    left_out = {id(p) for p in writer}
    trained = {
        n for n, p in trunk.named_parameters(remove_duplicate=False) if p.requires_grad and id(p) not in left_out
    }
    return tuple(name for name in block_params(trunk, block) if name in trained)


def run_block(trunk: nn.Module, block: PathBlock, params: Mapping[str, Tensor], x: Tensor, further: Further) -> Tensor:
    """Return f_i(x) with these parameters in place of the block's own."""
    for name, (args, kwargs) in zip(block.modules, further, strict=True):
        module, start = trunk.get_submodule(name), f"{name}."
        own = {n.removeprefix(start): p for n, p in params.items() if n.startswith(start)}
        x = call(module, own, (x, *args), kwargs, places=places_of(module))
    return x
