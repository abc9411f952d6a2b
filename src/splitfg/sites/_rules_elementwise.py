"""Pullbacks of elementwise functions: activations, arithmetic, masks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import jvp
from torch.nn import functional as F

from splitfg.sites._rule_table import RULES, Pulled, argument, first_and_rest, rule, summed_to
from splitfg.sites._tape import ACTIVATIONS, Operation


def derivative(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return f'(x) of an elementwise function, by its own forward-mode rule."""
    pushed: Tensor = jvp(function, (x,), (torch.ones_like(x),))[1]
    return pushed


@rule("relu", "relu_", inputs=False)
def _relu(operation: Operation, delta: Tensor) -> Pulled:
    yield operation.input, delta * (operation.output > 0)


_ELEMENTWISE = (
    *(name for name in ACTIVATIONS.values() if name != "relu"),
    *("abs", "cos", "erf", "exp", "expm1", "log", "log1p", "neg", "pow", "reciprocal", "rsqrt", "sin"),
    *("sqrt", "square", "softsign", "logsigmoid", "hardshrink", "threshold"),
)


def _elementwise(operation: Operation, delta: Tensor) -> Pulled:
    function = getattr(F, operation.name, None) or getattr(torch, operation.name)
    x, rest, settings = first_and_rest(operation)
    formula = _FORMULAS.get(operation.name)
    if formula is not None and not rest and not settings:
        yield x, formula(delta, x, operation.output)
    else:
        wide = x if x.shape == delta.shape else x.expand(delta.shape).contiguous()  # an exponent may be wider
        yield x, summed_to(delta * derivative(lambda a: function(a, *rest, **settings), wide), x)


_FORMULAS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "hardswish": lambda delta, x, _: torch.ops.aten.hardswish_backward(delta, x),
    "hardsigmoid": lambda delta, x, _: torch.ops.aten.hardsigmoid_backward(delta, x),
    "gelu": lambda delta, x, _: torch.ops.aten.gelu_backward(delta, x),
    "silu": lambda delta, x, _: torch.ops.aten.silu_backward(delta, x),
    "sigmoid": lambda delta, _, y: torch.ops.aten.sigmoid_backward(delta, y),
    "tanh": lambda delta, _, y: torch.ops.aten.tanh_backward(delta, y),
}
"""δ f'(x) from δ, x and f(x) in one kernel, for functions without further arguments."""


@rule("clamp", output=False)
def _clamp(operation: Operation, delta: Tensor) -> Pulled:
    x, limits = operation.input, (argument(operation, 1, "min", None), argument(operation, 2, "max", None))
    inside = torch.ones_like(x, dtype=torch.bool) if limits[0] is None else x >= limits[0]
    yield x, summed_to(delta * (inside if limits[1] is None else inside & (x <= limits[1])), x)


RULES.update(dict.fromkeys(_ELEMENTWISE, _elementwise))


def pull_back_activation(operation: Operation, delta: Tensor) -> Pulled:
    if isinstance(operation.module, nn.ReLU):
        return _relu(operation, delta)
    assert operation.module is not None
    # the class's own forward: hooks on the module belong to the pass, not to its derivative
    function = partial(type(operation.module).forward, operation.module)
    return [(operation.input, delta * derivative(function, operation.input))]


@rule("dropout", inputs=False, output=False)
def _dropout(operation: Operation, delta: Tensor) -> Pulled:
    kept = not argument(operation, 2, "training", True) or argument(operation, 1, "p", 0.5) == 0
    if not kept:
        raise NotImplementedError("dropout in training mode: call .eval() on it or set p=0")
    yield operation.input, delta


@rule("add", inputs=False, output=False)
def _add(operation: Operation, delta: Tensor) -> Pulled:
    a, b = _operands(operation)
    yield from _terms(a, b, delta, operation.kwargs.get("alpha", 1))


@rule("sub", inputs=False, output=False)
def _sub(operation: Operation, delta: Tensor) -> Pulled:
    a, b = _operands(operation)
    yield from _terms(a, b, delta, -operation.kwargs.get("alpha", 1))


@rule("rsub", inputs=False, output=False)
def _rsub(operation: Operation, delta: Tensor) -> Pulled:
    b, a = _operands(operation)
    yield from _terms(a, b, delta, -operation.kwargs.get("alpha", 1))


def _terms(a: Any, b: Any, delta: Tensor, scale: float) -> Pulled:
    if isinstance(a, Tensor):
        yield a, summed_to(delta, a)
    if isinstance(b, Tensor):
        yield b, summed_to(delta if scale == 1 else scale * delta, b)


@rule("mul", output=False)
def _mul(operation: Operation, delta: Tensor) -> Pulled:
    a, b = _operands(operation)
    if isinstance(a, Tensor):
        yield a, summed_to(delta * b, a)
    if isinstance(b, Tensor):
        yield b, summed_to(delta * a, b)


@rule("div")
def _div(operation: Operation, delta: Tensor) -> Pulled:
    a, b = _operands(operation)
    if operation.kwargs.get("rounding_mode") is not None:
        raise NotImplementedError("a rounded quotient: detach it")
    if isinstance(a, Tensor):
        yield a, summed_to(delta / b, a)
    if isinstance(b, Tensor):
        yield b, summed_to(-delta * operation.output / b, b)


@rule("rdiv")
def _rdiv(operation: Operation, delta: Tensor) -> Pulled:
    x, _ = _operands(operation)
    yield x, -delta * operation.output / x


@rule("addcmul", output=False)
def _addcmul(operation: Operation, delta: Tensor) -> Pulled:
    x, a, b = (argument(operation, i, name, None) for i, name in enumerate(("input", "tensor1", "tensor2")))
    scaled = operation.kwargs.get("value", 1) * delta
    yield x, summed_to(delta, x)
    yield a, summed_to(scaled * b, a)
    yield b, summed_to(scaled * a, b)


@rule("lerp", output=False)
def _lerp(operation: Operation, delta: Tensor) -> Pulled:
    a, b = argument(operation, 0, "input", None), argument(operation, 1, "end", None)
    weight = argument(operation, 2, "weight", None)
    yield a, summed_to(delta * (1 - weight), a)
    yield b, summed_to(delta * weight, b)
    if isinstance(weight, Tensor):
        yield weight, summed_to(delta * (b - a), weight)


@rule("masked_fill", inputs=False, output=False)
def _masked_fill(operation: Operation, delta: Tensor) -> Pulled:
    x = operation.input
    yield x, summed_to(delta.masked_fill(argument(operation, 1, "mask", None), 0), x)


@rule("where", inputs=False, output=False)
def _where(operation: Operation, delta: Tensor) -> Pulled:
    condition, a, b = (argument(operation, i, name, None) for i, name in enumerate(("condition", "input", "other")))
    if condition.dtype != torch.bool:  # a.where(condition, b)
        condition, a = argument(operation, 1, "condition", None), operation.input
    if isinstance(a, Tensor):
        yield a, summed_to(torch.where(condition, delta, 0), a)
    if isinstance(b, Tensor):
        yield b, summed_to(torch.where(condition, 0, delta), b)


def _operands(operation: Operation) -> tuple[Any, Any]:
    return argument(operation, 0, "input", None), argument(operation, 1, "other", None)
