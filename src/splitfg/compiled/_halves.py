"""A pure function compiled in two halves, with a pause for a value that is computed in between."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from splitfg.compiled._recorder import Compile

Paused = Callable[[Sequence[Tensor], Sequence[Tensor]], tuple[Tensor, Any]]
"""From early and late arguments to a first result, which depends on the early ones alone, and all other results."""


class CompiledHalves:
    """Two compiled functions that compute what one function does: its first result, and later the others.

    The function is traced once for the given arguments. The first half returns, beside its result, the values that the
    second half reads; entrywise operations on values that are kept anyway are computed again instead.

    Args:
        function: The function; must not change its arguments.
        early: Tensors that the first result depends on.
        late: Tensors that are known after the first result.
        compile_: Compiles a function.

    Example:
        >>> import torch
        >>> from splitfg.compiled import CompiledHalves
        >>> w, a = torch.randn(3, 3), torch.randn(2, 3)
        >>> def function(early, late):
        ...     h = early[0] @ early[1]
        ...     return h, {"grad": early[0].T @ late[0]}
        >>> halves = CompiledHalves(function, [a, w], [torch.randn(2, 3)], compile_=lambda f: f)
        >>> h, kept = halves.first([a, w])
        >>> torch.equal(halves.second([a, w], kept, [h])["grad"], a.T @ h)
        True
    """

    def __init__(self, function: Paused, early: Sequence[Tensor], late: Sequence[Tensor], *, compile_: Compile) -> None:
        def flat(*arguments: Tensor) -> list[Tensor]:
            first, others = function(arguments[: len(early)], arguments[len(early) :])
            leaves, self._structure = pytree.tree_flatten(others)
            return [first, *leaves]

        arguments = (*early, *late)
        traced = make_fx(flat)(*arguments)
        traced.graph.eliminate_dead_code()
        traced.recompile()
        pure = make_fx(functionalize(traced))(*arguments)  # values that are filled in place belong to one half
        pure.graph.eliminate_dead_code()
        first, second = _halved(pure, len(early))
        self._first, self._second = compile_(first), compile_(second)

    def first(self, early: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
        """Return the first result, and the values to keep for :meth:`second`."""
        result, *kept = self._first(*early)
        return result, kept

    def second(self, early: Sequence[Tensor], kept: Sequence[Tensor], late: Sequence[Tensor]) -> Any:
        """Return the other results."""
        return pytree.tree_unflatten(list(self._second(*kept, *early, *late)), self._structure)


def _halved(graph: fx.GraphModule, early: int) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Cut a traced function in two graphs: ``early -> (result, *kept)`` and ``(*kept, *early, *late) -> others``."""
    nodes = list(graph.graph.nodes)
    given = [n for n in nodes if n.op == "placeholder"]
    (result, *others) = nodes[-1].args[0]
    above = _needed([result])
    if not above.isdisjoint(given[early:]):
        raise ValueError("the first result depends on late arguments")
    below = _needed(others) - above
    read = {n for m in below for n in m.all_input_nodes if n in above} | {n for n in others if n in above}
    free = {*given, *(n for n in nodes if n.op == "get_attr")}
    kept, again = _recomputed([n for n in nodes if n in read - free], free)
    first = _graph(graph, given[:early], [n for n in nodes if n in above], [result, *kept])
    body = [n for n in nodes if n in below or n in again or (n in free and n.op == "get_attr")]
    return first, _graph(graph, [*kept, *given], body, others)


def _needed(results: Iterable[Any]) -> set[fx.Node]:
    """Return the nodes that results are computed from, with the results and the arguments they depend on."""
    found: set[fx.Node] = set()
    left = [n for n in results if isinstance(n, fx.Node)]
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += node.all_input_nodes
    return found


def _recomputed(read: list[fx.Node], free: set[fx.Node]) -> tuple[list[fx.Node], set[fx.Node]]:
    """Divide what the second half reads into values to keep and values to compute again from those."""
    kept, again = set(read), set[fx.Node]()
    for node in reversed(read):
        if _is_cheap(node) and all(n in free or n in kept for n in node.all_input_nodes):
            kept.remove(node)
            again.add(node)
    return [n for n in read if n in kept], again


def _is_cheap(node: fx.Node) -> bool:
    """Whether a node computes every entry by itself, or is a view."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return torch.Tag.pointwise in target.tags or target.is_view


def _graph(
    source: fx.GraphModule, arguments: Sequence[fx.Node], body: Sequence[fx.Node], results: Sequence[Any]
) -> fx.GraphModule:
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for index, node in enumerate(arguments):
        copies[node] = graph.placeholder(f"a{index}")
    for node in body:
        if node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output([copies[n] if isinstance(n, fx.Node) else n for n in results])
    return fx.GraphModule(source, graph)
