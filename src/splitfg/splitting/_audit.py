"""One pass with tangents that watches every operator: tangents that are dropped, and those that pass no_grad blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from splitfg.calling import same_generators
from splitfg.errors import shorten
from splitfg.splitting._differences import in_no_grad_block
from splitfg.splitting._duals import dual_pass, moves, primal_of, tangent_of, without_graph
from splitfg.splitting._replace import labelled
from splitfg.splitting._split import Split
from splitfg.types import Inputs, Params

NO_GRAD = (
    "a tangent passes through torch.no_grad(), whose results backprop treats as constants, so that J·v would not be its"
    " derivative: use .detach() on the results in place of torch.no_grad(), or remove it to differentiate them"
)
# Relative difference of two passes through the same operators that the order of sums explains.
_ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-5}
_NARROW_ROUNDING = 3e-2


def dropped(split: Split, x: Inputs, v: Params, dh: Tensor) -> list[str]:
    """List the modules that call an operator with a backward rule and no forward-mode rule, which drops tangents.

    Such operators show whatever their share of h is, so that no finite difference has to resolve it. If there are none,
    lists the modules with ``torch.no_grad()`` blocks that tangents pass: in this pass they stop there, as gradients do,
    and J v changes. Makes one pass with a tangent.

    Args:
        split: The network.
        x: Inputs.
        v: Direction, by parameter name.
        dh: J v, flat.
    """
    operators = Operators(stop=True)
    with dual_pass(split, v) as duals:
        with named_calls(split.trunk, operators.stack), operators:
            h = without_graph(split, x)(duals)
        stopped = tangent_of(h).flatten()
    if operators.lost:
        return [f"{_label(split, name)}: {without_rule(lost)}" for name, lost in operators.lost.items()]
    difference, size = (stopped - dh).double().norm(), dh.double().norm()
    if not operators.passed or bool(difference <= _ROUNDING.get(dh.dtype, _NARROW_ROUNDING) * size):
        return []
    return [f"{shorten([_label(split, name) for name in operators.passed])}: {NO_GRAD}"]


def without_rule(operator: str) -> str:
    """Word the problem of an operator that drops tangents."""
    return (
        f"the operator {operator} has a backward rule and no forward-mode rule, and drops tangents without an error:"
        " use engine=CentralDifference(), or write it with operators that have one, such as a torch.autograd.Function"
        " with jvp"
    )


def _label(split: Split, name: str) -> str:
    return labelled(name, split.trunk.get_submodule(name))


@contextmanager
def named_calls(trunk: nn.Module, stack: list[str]) -> Iterator[None]:
    """Keep the names of the modules that are being called on a stack."""

    def enter(name: str) -> Callable[..., None]:
        return lambda *_: stack.append(name)

    handles = [m.register_forward_pre_hook(enter(name), prepend=True) for name, m in trunk.named_modules()]
    handles += [m.register_forward_hook(lambda *_: _popped(stack)) for m in trunk.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _popped(stack: list[str]) -> None:
    stack.pop()


@dataclass(eq=False)
class Operators(TorchFunctionMode):
    """Records operators that drop the tangents of their arguments although backprop differentiates them.

    Attributes:
        stop: Whether tangents stop at ``torch.no_grad()`` blocks.
        lost: The first such operator of every module, by the module's name.
        passed: Names of modules with ``torch.no_grad()`` blocks that tangents reach.
        stack: Names of the modules that are being called; see :func:`named_calls`.
        paused: Whether to record nothing.
    """

    stop: bool = False
    lost: dict[str, str] = field(default_factory=dict)
    passed: dict[str, None] = field(default_factory=dict)
    stack: list[str] = field(default_factory=list)
    paused: bool = False

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.stop and in_no_grad_block():
            return self._stopped(func, args, kwargs)
        result = func(*args, **kwargs)
        if not self.paused and torch.is_grad_enabled() and _loses_tangent(func, args, kwargs, result):
            self.lost.setdefault(self._module, str(func))
        return result

    @property
    def _module(self) -> str:
        return self.stack[-1] if self.stack else ""

    def _stopped(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function with arguments that carry no tangents; writes in place take effect on the arguments."""
        originals: dict[int, Tensor] = {}

        def still(value: Tensor) -> Tensor:
            if not moves(value):
                return value
            primal = primal_of(value)
            originals[id(primal)] = value
            return primal

        with torch._C.DisableTorchFunction():
            args, kwargs = pytree.tree_map_only(Tensor, still, (args, kwargs))
        result = func(*args, **kwargs)
        if originals and _floats(result):
            self.passed[self._module] = None
        return pytree.tree_map_only(Tensor, lambda t: originals.get(id(t), t), result)


def _loses_tangent(func: Any, args: Any, kwargs: Any, result: Any) -> bool:
    with torch._C.DisableTorchFunction():
        floats = _floats(result)
        given, structure = pytree.tree_flatten((args, kwargs))
        moving = {i: primal_of(t) for i, t in enumerate(given) if isinstance(t, Tensor) and moves(t)}
        if not floats or not moving or any(moves(t) for t in floats):
            return False
        fresh = {i: t.detach().clone().requires_grad_() for i, t in moving.items()}
        own_args, own_kwargs = pytree.tree_unflatten([fresh.get(i, t) for i, t in enumerate(given)], structure)
    try:
        with same_generators():
            outputs = [t for t in _floats(func(*own_args, **own_kwargs)) if t.requires_grad and not t.is_leaf]
            ones = [torch.ones_like(t) for t in outputs]
            grads = torch.autograd.grad(outputs, list(fresh.values()), ones, allow_unused=True) if outputs else ()
    except Exception:  # such as a write in place to a leaf
        return False
    return any(g is not None and bool(g.any()) for g in grads)


def _floats(value: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor) and t.is_floating_point()]
