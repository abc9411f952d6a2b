"""The table of pullbacks, and what its rules share.

A rule reads the values that its operation read and wrote, and no weight. Matrix products are between activations; a
product with a parameter belongs into a layer such as ``nn.Linear``, whose feedback is learned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, TypeAlias

from torch import Tensor

from splitfg.sites._tape import Operation

Pulled: TypeAlias = Iterable[tuple[Any, Tensor]]
"""Inputs, each with its share of δ; entries that are no tensors are skipped."""

Rule: TypeAlias = Callable[[Operation, Any], Pulled]
"""From an operation and δ at its output (a list for several outputs, ``None`` where there is none) to shares."""

RULES: Final[dict[str, Rule]] = {}
"""Rules by the names of torch functions."""

READS: Final[dict[Rule, tuple[bool, bool]]] = {}
"""Whether a rule reads values of its operation's inputs and of its output; rules that are not here may read both."""


def rule(*names: str, inputs: bool = True, output: bool = True) -> Callable[[Rule], Rule]:
    """Decorate the rule of some functions.

    Args:
        names: Of the functions.
        inputs: Whether the rule reads values of the operation's inputs, rather than shapes and dtypes alone.
        output: Whether it reads values of the output.
    """

    def add(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        READS[function] = inputs, output
        return function

    return add


def argument(operation: Operation, place: int, name: str, default: Any) -> Any:
    """Return an argument given by position or by name, also by NumPy's name, which torch takes too."""
    if len(operation.args) > place:
        return operation.args[place]
    other = {"dim": "axis", "keepdim": "keepdims"}.get(name, name)
    return operation.kwargs.get(name, operation.kwargs.get(other, default))


def first_and_rest(operation: Operation) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
    """Return the input, the other arguments and the keyword arguments of an operation."""
    settings = {name: value for name, value in operation.kwargs.items() if name != "input"}
    return operation.input, operation.args[1:], settings


def summed_to(delta: Tensor, like: Tensor) -> Tensor:
    """Sum δ over the dimensions along which an input was broadcast."""
    return delta.sum_to_size(like.shape) if delta.shape != like.shape else delta
