"""Properties of a network that its autograd graph shows."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction


def custom_functions(output: Tensor) -> set[str]:
    """Return the names of ``torch.autograd.Function`` classes in the graph of an output."""
    waiting: list[Any] = [output.grad_fn]
    seen, names = set(), set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if issubclass(type(node), BackwardCFunction):
            names.add(node.name().removesuffix("Backward"))
        waiting += [following for following, _ in node.next_functions]
    return names
