"""Tapes that keep only the values of a pass that a sweep along a relay reads, as autograd does for backpropagation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from splitfg.sites._layers import is_linear
from splitfg.sites._nested import mapped, tensors_in
from splitfg.sites._pullback import is_norm
from splitfg.sites._record_tape import record_into
from splitfg.sites._rule_table import READS, RULES
from splitfg.sites._rules import rule_for
from splitfg.sites._tape import Operation, Tape, is_differentiable


def record_lean_tape(trunk: nn.Module, run: Callable[[], Tensor], trained: Mapping[int, str]) -> Tape:
    """Run a trunk once, as :func:`record_tape`, and keep only the values that closed forms read.

    These are the inputs of layers and norms, the outputs of ReLUs, the values that rules of other operations read, and
    h. In place of every other value the tape has a tensor of its shape and dtype that takes no memory and is filled
    with NaN. The pass frees these values as it goes on.
    """
    store = _LeanStore(trained)
    h = record_into(store, trunk, run, trained)
    return store.tape(h)


@dataclass(eq=False)
class _Value:
    """A value of a pass: the tensor if an operation reads it, and otherwise its shape alone."""

    shape: Tensor
    kept: Tensor | None = None

    @property
    def tensor(self) -> Tensor:
        return self.shape if self.kept is None else self.kept


class _LeanStore:
    def __init__(self, trained: Mapping[int, str]) -> None:
        self._trained = trained
        self._values = WeakTensorKeyDictionary()  # a freed tensor leaves it, and its id may be used again
        self._operations: list[Operation] = []
        self._nan: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    @property
    def count(self) -> int:
        return len(self._operations)

    def is_active(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value in self._values

    def add(self, operation: Operation) -> None:
        reads_inputs, reads_output = (False, False) if self._scales(operation) else _reads(operation)
        with torch._C.DisableTorchFunction():
            args, kwargs = self._named((operation.args, dict(operation.kwargs)), kept=reads_inputs)
            for t in filter(is_differentiable, tensors_in(operation.output)):
                self._values[t] = _Value(self._shape(t))
            output = self._named(operation.output, kept=reads_output)
        self._operations.append(operation.holding(args, kwargs, output))

    def tape(self, h: Tensor) -> Tape:
        if self.is_active(h):
            self._values[h].kept = h
        tape = Tape(h=h)
        for operation in self._operations:
            values = (operation.args, dict(operation.kwargs), operation.output)
            args, kwargs, output = mapped(_Value, lambda value: value.tensor, values)
            tape.add(operation.holding(args, kwargs, output))
        return tape

    def _scales(self, operation: Operation) -> bool:
        """Whether an operation is x c or x / c with a constant c, such as a dropout mask: its rule reads c alone."""
        if operation.name not in ("mul", "div") or RULES.get(operation.name) not in READS:
            return False
        operands = [*operation.args, *operation.kwargs.values()]
        depends = [self.is_active(t) or id(t) in self._trained for t in operands]
        return sum(depends) == 1 and (operation.name == "mul" or depends[0])

    def _shape(self, t: Tensor) -> Tensor:
        """Return a tensor of the same shape and dtype that takes no memory; NaN, to make mistaken reads visible."""
        key = t.dtype, t.device
        if key not in self._nan:
            self._nan[key] = torch.full((), torch.nan, dtype=t.dtype, device=t.device)
        return self._nan[key].expand(t.shape)

    def _named(self, values: Any, *, kept: bool) -> Any:
        """Return values in place of the tensors of the pass; keep these tensors if an operation reads them."""

        def named(t: Tensor) -> Tensor | _Value:
            value: _Value | None = self._values.get(t)
            if value is None:
                return t
            if kept:
                value.kept = t
            return value

        return mapped(Tensor, named, values)


def _reads(operation: Operation) -> tuple[bool, bool]:
    """Whether a sweep reads the values of an operation's inputs, and of its output."""
    module = operation.module
    if type(module) is nn.ReLU:
        return False, True
    if module is not None and (is_norm(module) or is_linear(module)):
        return True, False
    rule = None if module is not None else rule_for(operation)
    return (True, True) if rule is None else READS.get(rule, (True, True))
