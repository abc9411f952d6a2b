"""Pulling gradients back through one block in compiled code."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from splitfg.compiled._recorder import Compile
from splitfg.compiled._traces import constants_of, plain_fact
from splitfg.sites import BlockInput, Pulled, block_params, pull_with, pulled_names
from splitfg.types import Params

_Run = Callable[[Params, Tensor, Sequence[Tensor], Sequence[Tensor]], tuple[Any, ...]]


class CompiledPuller:
    """A :class:`~splitfg.sites.Puller` that runs every block's pull in compiled code.

    A block's pull is traced to its operators once for every shape of its inputs, and blocks with the same trace share
    one compiled function. Parameters, inputs and gradients are arguments of it; other tensors that a block reads are
    constants of the trace.

    Args:
        compile_: Compiles a function.
    """

    def __init__(self, compile_: Compile) -> None:
        self._compile = compile_
        self._pulls: dict[Hashable, tuple[_Run, tuple[Tensor, ...]]] = {}
        self._shared: dict[Hashable, _Run] = {}

    def __call__(self, trunk: nn.Module, given: BlockInput, deltas: Sequence[Tensor], *, to_input: bool) -> Pulled:
        """Pull gradients back through one block."""
        modules = [trunk.get_submodule(name) for name in given.block.modules]
        params, names = block_params(trunk, given.block), pulled_names(trunk, given.block)
        leaves, structure = pytree.tree_flatten(list(given.further))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        arguments = (params, given.x, tensors, list(deltas))
        plain = tuple(None if isinstance(leaf, Tensor) else plain_fact(leaf) for leaf in leaves)
        constants, held = constants_of(m for module in modules for m in module.modules())
        key = (given.block, names, to_input, constants, plain, structure, _facts(arguments))
        if key not in self._pulls:
            self._pulls[key] = self._traced(trunk, given, names, to_input, arguments), held
        run, _ = self._pulls[key]
        shares, grads, reads = run(*arguments)
        return Pulled(shares, dict(zip(names, grads, strict=True)), reads[0] if reads else None)

    def _traced(
        self, trunk: nn.Module, given: BlockInput, names: Sequence[str], to_input: bool, arguments: tuple[Any, ...]
    ) -> _Run:
        leaves, structure = pytree.tree_flatten(list(given.further))

        def run(
            params: Sequence[Tensor], x: Tensor, tensors: Sequence[Tensor], deltas: Sequence[Tensor]
        ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
            left = iter(tensors)
            filled = [next(left) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            further = pytree.tree_unflatten(filled, structure)
            named = dict(zip(every, params, strict=True))
            pulled = pull_with(trunk, given.block, named, names, x, further, deltas, to_input=to_input)
            reads = [] if pulled.read is None else [pulled.read]
            return list(pulled.shares), [pulled.grads[n] for n in names], reads

        params, *others = arguments
        every = list(params)
        graph = make_fx(run)(list(params.values()), *others)
        graph.graph.eliminate_dead_code()
        graph.recompile()
        compiled = self._compiled(graph, _facts(arguments))
        return lambda params, *rest: compiled(list(params.values()), *rest)

    def _compiled(self, graph: fx.GraphModule, facts: Hashable) -> Callable[..., Any]:
        """Compile a trace, or return the compiled function of an equal one without constants."""
        constants = any(True for _ in graph.buffers()) or any(n.op == "get_attr" for n in graph.graph.nodes)
        if constants:
            return self._compile(graph)
        key = (graph.code, facts)
        if key not in self._shared:
            self._shared[key] = self._compile(graph)
        return self._shared[key]


def _facts(arguments: tuple[Any, ...]) -> Hashable:
    """Return shape, dtype and device of all tensors, in order."""
    tensors = pytree.tree_leaves(arguments)
    return tuple((tuple(t.shape), t.stride(), t.dtype, t.device) for t in tensors)
