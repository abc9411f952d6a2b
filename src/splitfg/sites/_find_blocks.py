"""Find the blocks of a trunk in one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils import _pytree as pytree

from splitfg.errors import SplitError, raise_if, shorten
from splitfg.numerics import close
from splitfg.sites._block_path import BlockPath, PathBlock
from splitfg.sites._layers import has_layer_gradients
from splitfg.sites._pullback import has_pull_back, is_norm
from splitfg.sites._taps import tapped
from splitfg.sites._validate import broadcasts, read_rows
from splitfg.splitting import Split, split as cut
from splitfg.types import Inputs


@dataclass(frozen=True)
class _Call:
    """One call of a module, with its inputs and output."""

    name: str
    module: nn.Module
    read: Tensor
    wrote: Tensor


def find_block_path(network: Split | nn.Module, batch: Inputs) -> BlockPath:
    """Find the blocks of a trunk; see :meth:`BlockPath.find`."""
    given = network if isinstance(network, Split) else cut(network)
    x = given.interface.inputs(batch)
    problem = given.disagreement(x)
    raise_if([] if problem is None else [problem])
    return _Search(given, x).path()


class _Search:
    """Walks back from h, from the output of a module to its inputs."""

    def __init__(self, split: Split, x: Inputs) -> None:
        self._trunk = split.trunk
        self._calls: list[_Call] = []
        modules = {name: module for name, module in split.trunk.named_modules() if name}

        def tap(name: str, a: Tensor, z: Tensor) -> None:
            # values inside torch.vmap have no memory of their own
            if isinstance(a, Tensor) and isinstance(z, Tensor) and not is_functorch_wrapped_tensor(z):
                self._calls.append(_Call(name, modules[name], a, z))

        # a graph without what a backward pass needs shows which values depend on parameters
        forget = torch.autograd.graph.saved_tensors_hooks(lambda _: None, lambda t: t)
        with torch.enable_grad(), forget, tapped(split.trunk, modules, tap):
            self._h = split.trunk_function(pytree.tree_map(_without_graph, x))({})

    def path(self) -> BlockPath:
        """Return the path.

        Raises:
            SplitError: If h does not come from a chain of modules that begins with data or a sum of layers.
        """
        chain, bottom = self._chain()
        writers, added = self._writers(chain, bottom) if bottom.requires_grad else ((), ())
        chain = [part for call in chain for part in self._parts(call) if not isinstance(part.module, nn.Identity)]
        top = chain.pop() if len(chain) > 1 and has_pull_back(chain[-1].module) else None
        blocks = [PathBlock(names) for names in _grouped(chain)]
        pooled = top is not None and top.read.ndim == 4 and self._h.numel() == top.read[..., 0, 0].numel()
        beside = dict.fromkeys(added, writers[0]) if writers else {}
        name = None if top is None else top.name
        return BlockPath(tuple(blocks), top=name, writers=writers, added=beside, pooled=pooled)

    def _chain(self) -> tuple[list[_Call], Tensor]:
        """Return the outermost modules that lead to h, in order, and the value that the first reads."""
        chain: list[_Call] = []
        value, before = self._h, len(self._calls)
        while value.requires_grad:
            place = self._maker(value, before)
            if place is None:
                break
            chain.append(self._calls[place])
            value, before = chain[-1].read, place
        chain = [call for call in reversed(chain) if not isinstance(call.module, nn.Identity)]
        if not chain:
            words = "h comes from a function that is no module, such as a mean"
            raise SplitError([f"{words}: make it a module, or name the blocks with BlockPath(...)"])
        return chain, value

    def _maker(self, value: Tensor, before: int) -> int | None:
        """Return the place of the outermost call that gave a value, the last of several."""
        calls = list(enumerate(self._calls[:before]))
        found = [i for i, call in calls if call.wrote is value] or [i for i, call in calls if _same(call.wrote, value)]
        return min(found, key=lambda i: (self._calls[i].name.count("."), -i), default=None)

    def _parts(self, call: _Call) -> list[_Call]:
        """Return the children of an ``nn.Sequential``, and other modules as they are."""
        if type(call.module) is not nn.Sequential or len(call.module) < 2:
            return [call]
        inside = [f"{call.name}.{child}" for child, _ in call.module.named_children()]
        children = [other for other in self._calls if other.name in inside]
        return [part for child in children for part in self._parts(child)] if len(children) == len(inside) else [call]

    def _writers(self, chain: Sequence[_Call], bottom: Tensor) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the layers and parameters that sum to the bottom of the chain."""
        named = {call.name for call in chain}
        inside = tuple(f"{name}." for name in named)
        outside = [c for c in self._calls if c.name not in named and not c.name.startswith(inside)]
        layers = [c for c in outside if has_layer_gradients(c.module) and not is_norm(c.module)]
        trained = [c for c in layers if c.wrote.requires_grad]
        owned = {id(p) for call in self._calls for p in call.module.parameters()}
        free = [name for name, p in self._trunk.named_parameters() if p.requires_grad and id(p) not in owned]
        tables = [read_rows(self._trunk.get_parameter(name), bottom) for name in free]
        for tried in (trained, layers):  # a frozen table may be added, too
            if tried and _sum_to(bottom, [*(c.wrote.detach() for c in tried), *tables]):
                fed = [c.name for c in tried if c.read.requires_grad]
                words = "reads what another trained layer writes: name it in a block with BlockPath(...)"
                raise_if([f"{name} {words}" for name in fed])
                return tuple(c.name for c in tried), tuple(free)
        words = f"what {chain[0].name} reads is neither data nor a sum of layers' outputs"
        known = [*(c.name for c in trained), *free]
        seen = f" ({shorten(known)} do not sum to it)" if known else ""
        raise SplitError([f"{words}{seen}: make functions before it modules, or name the blocks with BlockPath(...)"])


def _sum_to(bottom: Tensor, parts: Sequence[Tensor | None]) -> bool:
    fitting = [part for part in parts if part is not None and broadcasts(part, bottom)]
    return len(fitting) == len(parts) and close(sum(fitting, torch.zeros_like(bottom)), bottom.detach())


def _grouped(chain: Sequence[_Call]) -> list[tuple[str, ...]]:
    """Return the modules of every block: trained ones but norms begin a block, others belong to the one before."""
    groups: list[list[_Call]] = [[]]
    for call in chain:
        begins = any(p.requires_grad for p in call.module.parameters()) and not is_norm(call.module)
        if begins and any(_trained(other) for other in groups[-1]):
            groups.append([])
        groups[-1].append(call)
    return [tuple(call.name for call in group) for group in groups]


def _without_graph(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _trained(call: _Call) -> bool:
    return any(p.requires_grad for p in call.module.parameters())


def _same(value: Tensor, other: Tensor) -> bool:
    """Return whether two tensors share their values, flattened or not."""
    return value.data_ptr() == other.data_ptr() and value.numel() == other.numel()
