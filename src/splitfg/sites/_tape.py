"""A tape of one forward pass: every operation between h and the trained parameters, with its inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from splitfg.sites._layers import has_layer_gradients
from splitfg.sites._nested import tensors_in
from splitfg.sites._pullback import has_pull_back

Alter = Callable[[int, Any], Any]
"""From an operation's place on the tape and its output to the output that the pass goes on with."""


@dataclass(frozen=True, eq=False)
class Operation:
    """One call of a leaf module or of a torch function.

    Attributes:
        name: Dotted name of the module, or the function's own name (``relu``, ``add``, ``matmul``).
        module: The module; ``None`` for a function.
        args: Positional arguments.
        kwargs: Keyword arguments.
        output: A tensor, or a tuple of tensors.
        autocast: The dtype that autocast gave a module's products; ``None`` without autocast.
        caller: Name and class of the module that calls a function, for messages; empty for a module.
    """

    name: str
    module: nn.Module | None
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any
    autocast: torch.dtype | None = None
    caller: str = ""

    def holding(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Operation:
        """Return the same call with other values."""
        return Operation(self.name, self.module, args, kwargs, output, self.autocast, self.caller)

    def run(self, a: Tensor) -> Any:
        """Return the module's output for ``a`` in place of its first argument; runs no hooks."""
        assert self.module is not None
        first = [] if self.args else [next(iter(self.kwargs))]
        args, kwargs = (a, *self.args[1:]) if self.args else (), {**self.kwargs, **dict.fromkeys(first, a)}
        with nullcontext() if self.autocast is None else torch.autocast(a.device.type, self.autocast):
            return self.module.forward(*args, **kwargs)

    @property
    def input(self) -> Tensor:
        """The first argument."""
        first: Tensor = self.args[0] if self.args else next(iter(self.kwargs.values()))
        return first

    def __str__(self) -> str:
        if self.module is None:
            return f"{self.caller}: {self.name}" if self.caller else self.name
        return f"{self.name} ({type(self.module).__name__})"


@dataclass(eq=False)
class Tape:
    """The operations of a pass that depend on a trained parameter, in the order of their calls.

    Attributes:
        operations: The calls.
        h: The result of the pass.
        alone: Runs layers by themselves: from their places on the tape and what they read to what they write; ``None``
            if their modules compute that.
    """

    operations: list[Operation] = field(default_factory=list)
    h: Tensor = field(default_factory=lambda: torch.empty(0))
    alone: Callable[[Mapping[int, Tensor]], Mapping[int, Tensor]] | None = None
    _active: dict[int, Tensor] = field(default_factory=dict)
    _layers: list[tuple[int, Operation]] = field(default_factory=list)
    _searched: int = 0

    @property
    def count(self) -> int:
        """Number of operations."""
        return len(self.operations)

    def is_active(self, value: Any) -> bool:
        """Whether a tensor depends on a trained parameter."""
        return isinstance(value, Tensor) and id(value) in self._active

    def add(self, operation: Operation) -> None:
        """Append an operation that depends on a trained parameter."""
        self.operations.append(operation)
        self._active.update({id(t): t for t in tensors_in(operation.output) if is_differentiable(t)})

    def release(self, place: int) -> None:
        """Free the values that an operation read and wrote; call it from the last operation to the first."""
        for t in tensors_in(self.operations[place].output):
            self._active.pop(id(t), None)
            if t is self.h:
                self.h = t.new_empty(0)
        self.operations[place] = self.operations[place].holding((), {}, None)
        self._layers = [(at, operation) for at, operation in self._layers if at != place]

    def layers(self) -> list[tuple[int, Operation]]:
        """Return the calls of layers; see :func:`layer_operations`."""
        for place in range(self._searched, len(self.operations)):
            module = self.operations[place].module
            if module is not None and has_layer_gradients(module) and not has_pull_back(module):
                self._layers.append((place, self.operations[place]))
        self._searched = len(self.operations)
        return self._layers


class Store(Protocol):
    """Takes the operations of a pass that is being recorded."""

    @property
    def count(self) -> int:
        """Number of operations so far."""

    def is_active(self, value: Any) -> bool:
        """Whether a tensor depends on a trained parameter."""

    def add(self, operation: Operation) -> None:
        """Append an operation that depends on a trained parameter."""


@runtime_checkable
class TapedTrunk(Protocol):
    """A trunk that makes its own tape, such as one that runs on a device and can only be read."""

    def tape(self, inputs: tuple[Any, ...], trained: Mapping[int, str], alter: Alter | None = None) -> Tape:
        """Run once and return the tape.

        Args:
            inputs: One batch.
            trained: From ``id`` of a trained parameter to its name.
            alter: Adds to the outputs of operations; called with a scalar zero in place of the output.
        """


def is_leaf(module: nn.Module) -> bool:
    """Whether a tape records a module as one operation: it has a rule of its own and no modules inside."""
    if next(module.children(), None) is not None:
        return False
    return has_layer_gradients(module) or has_pull_back(module) or is_activation(module)


ACTIVATIONS: dict[type[nn.Module], str] = {
    nn.ReLU: "relu",
    nn.ReLU6: "relu6",
    nn.LeakyReLU: "leaky_relu",
    nn.GELU: "gelu",
    nn.SiLU: "silu",
    nn.Mish: "mish",
    nn.ELU: "elu",
    nn.SELU: "selu",
    nn.CELU: "celu",
    nn.Tanh: "tanh",
    nn.Sigmoid: "sigmoid",
    nn.Softplus: "softplus",
    nn.Softsign: "softsign",
    nn.Hardswish: "hardswish",
    nn.Hardsigmoid: "hardsigmoid",
    nn.Hardtanh: "hardtanh",
    nn.LogSigmoid: "logsigmoid",
}
"""Activation modules that act on every entry by itself, with the name of their function."""


def is_activation(module: nn.Module) -> bool:
    """Whether a module is one of torch's elementwise activations; a subclass may compute something else."""
    return type(module) in ACTIVATIONS


def layer_operations(tape: Tape) -> list[tuple[int, Operation]]:
    """Return the calls of layers with their places: modules that know their own gradient, norms left out."""
    return tape.layers()


def is_differentiable(t: Tensor) -> bool:
    """Whether a tensor has real or complex entries."""
    return t.is_floating_point() or t.is_complex()
