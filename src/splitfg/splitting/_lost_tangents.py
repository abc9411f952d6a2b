"""Modules that lose tangents: each compared by itself with a finite difference and with its own backward pass."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from splitfg.calling import Observed, RandomState, call, drawing_from, places_of, random_state
from splitfg.errors import shorten
from splitfg.splitting._differences import DifferentPassError, Slope, measured
from splitfg.splitting._graph import custom_functions
from splitfg.splitting._replace import labelled
from splitfg.splitting._split import Split
from splitfg.types import Inputs, Params, TrunkFunction

_MEASURE = "use engine=CentralDifference()"
_ANYWAY = "to train with it as it is, pass check=False to split() or Split()"


def lost_tangents(split: Split, x: Inputs, v: Params, dtype: torch.dtype) -> list[str]:
    """List the innermost modules whose output has another tangent than backprop's derivative, grouped by cause.

    A module is compared at the tangent that it receives, so that an error in one module does not blame the next.

    Args:
        split: The network.
        x: Inputs.
        v: Direction, by parameter name.
        dtype: Precision of the computation.
    """
    search = _Search(dtype)
    with forward_ad.dual_level():
        duals = {name: forward_ad.make_dual(p, v[name]) for name, p in split.trunk_params().items()}
        with _hooked(split, search), search.operators:
            without_graph(split, x)(duals)
    places: dict[str, list[str]] = {}
    for place, cause in search.found.items():
        places.setdefault(cause, []).append(place)
    return [f"{shorten(names)}: {cause}" for cause, names in places.items()]


def without_graph(split: Split, x: Inputs) -> TrunkFunction:
    """Return θ ↦ h with inputs and all other parameters detached: passes with gradients enabled build no graph."""
    f = split.trunk_function(pytree.tree_map_only(Tensor, Tensor.detach, x))
    rest = split.all_trunk_params()
    return lambda params: f({**rest, **params})


@dataclass(eq=False)
class _Call:
    """One call of a module under forward mode: its moving inputs and parameters, and their tangents.

    Runs of the call draw the same random numbers, such as one dropout mask.
    """

    module: nn.Module
    leaves: list[Any]
    structure: Any
    params: Params
    observed: Observed
    random: RandomState

    @classmethod
    def of(cls, module: nn.Module, args: Any, kwargs: Any, observed: Observed) -> _Call:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        # a copy, since the module may write to its inputs
        leaves = [t.clone() if isinstance(t, Tensor) else t for t in leaves]
        return cls(module, leaves, structure, dict(module.named_parameters()), observed, random_state())

    def at(self, t: float) -> Tensor:
        """Run the module with inputs and parameters moved by t times their tangents."""
        return self.run(lambda value: _moved(value, t))

    def run(self, change: Callable[[Tensor], Tensor]) -> Tensor:
        """Run the module with changed inputs and parameters, and return its outputs in one vector."""
        args, kwargs = pytree.tree_unflatten(
            [change(t) if isinstance(t, Tensor) else t for t in self.leaves], self.structure
        )
        params = {name: change(p) for name, p in self.params.items()}
        with drawing_from(self.random):
            found = call(self.module, params, args, kwargs, places=places_of(self.module), observed=self.observed)
        return joined(found)


class _Search:
    """Compares modules while a pass with tangents runs; inner modules come first."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.operators = _Operators()
        self.found: dict[str, str] = {}
        self.faulty: set[str] = set()
        self.paused = False

    def compare(self, name: str, label: str, seen: _Call, output: Any) -> None:
        """Compare one call of a module, unless a module inside it is faulty."""
        if self.paused or any(not name or other.startswith(f"{name}.") for other in self.faulty):
            return
        self.paused = self.operators.paused = True
        try:
            cause = self._cause(seen, joined(output, _tangent), name)
        except DifferentPassError:
            cause = None
        finally:
            self.paused = self.operators.paused = False
        if cause is not None:
            self.faulty.add(name)
            self.found[label] = cause

    def _cause(self, seen: _Call, tangent: Tensor, name: str) -> str | None:
        slope = measured(seen.at, self.dtype)
        if slope is None or slope.agrees(tangent):
            return None
        backward, functions = _backward(seen)
        if backward is not None and _same_product(backward, tangent, self.dtype):
            return None  # a deliberate rule, such as a straight-through estimator
        through = measured(seen.at, self.dtype, no_grad=False)
        if through is not None and through.agrees(tangent):
            return (
                "a tangent passes through torch.no_grad(), whose results backprop treats as constants, so that J·v"
                " would not be its derivative: use .detach() on the results in place of torch.no_grad(), or remove"
                " it to differentiate them"
            )
        return self._worded(name, slope, tangent, backward is None, functions)

    def _worded(self, name: str, slope: Slope, tangent: Tensor, stops: bool, functions: list[str]) -> str:
        lost = self.operators.lost.get(name)
        if stops:
            return (
                f"{'it' if lost is None else f'the operator {lost}'} has neither a forward-mode rule nor a backward"
                f" rule, although its outputs move with its inputs, as in quantised layers: {_MEASURE}, replace it, or"
                " use .detach() on its inputs to treat them as constants"
            )
        if lost is not None:
            return (
                f"the operator {lost} has a backward rule and no forward-mode rule, and drops tangents without an"
                f" error: {_MEASURE}, or write it with operators that have one, such as a torch.autograd.Function with"
                " jvp"
            )
        what = f"the jvp of {', '.join(functions)}" if functions else "its tangent"
        return (
            f"{what} is not the derivative of its output (relative error {slope.deviation(tangent):.2g} against a"
            f" finite difference, and its backward differs too): correct it, {_MEASURE}, or, {_ANYWAY}"
        )


def _backward(seen: _Call) -> tuple[tuple[Tensor, Tensor] | None, list[str]]:
    """Return a random cotangent c with <Jᵀ c, tangents>, and the ``autograd.Function`` classes on the way.

    ``None`` in place of the pair if Jᵀ c is zero: the outputs do not depend on the moving inputs for reverse mode.
    """
    leaves: list[tuple[Tensor, Tensor]] = []

    def leaf(value: Tensor) -> Tensor:
        primal, tangent = _primal(value).detach().clone(), _tangent(value)
        if not _moves(value):
            return primal
        leaves.append((primal.requires_grad_(), tangent))
        return primal * 1  # modules may write to their inputs

    with torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of operators without a backward rule
        output = seen.run(leaf)
        if not output.requires_grad:
            return None, []
        c = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
        given = [primal for primal, _ in leaves]
        grads = torch.autograd.grad(output, given, c, allow_unused=True, materialize_grads=True)
    if not any(bool(g.any()) for g in grads):
        return None, []
    pairs = zip(grads, (tangent for _, tangent in leaves), strict=True)
    product = sum(((g.double() * t.double()).sum() for g, t in pairs), torch.zeros((), dtype=torch.float64))
    return (c, product), sorted(custom_functions(output))


def _same_product(backward: tuple[Tensor, Tensor], tangent: Tensor, dtype: torch.dtype) -> bool:
    c, product = backward
    error = {torch.float64: 1e-6, torch.float32: 1e-3}.get(dtype, 0.1)
    difference = float((c.double() * tangent.double()).sum() - product)
    return abs(difference) <= error * float(c.double().norm() * tangent.double().norm())


@dataclass(eq=False)
class _Operators(TorchFunctionMode):
    """Records the operators that drop the tangents of their arguments although backprop differentiates them."""

    lost: dict[str, str] = field(default_factory=dict)
    stack: list[str] = field(default_factory=list)
    paused: bool = False

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.paused and torch.is_grad_enabled() and _loses_tangent(func, args, kwargs or {}, result):
            self.lost.setdefault(self.stack[-1] if self.stack else "", str(func))
        return result


def _loses_tangent(func: Any, args: Any, kwargs: Any, result: Any) -> bool:
    with torch._C.DisableTorchFunction():
        floats = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor) and t.is_floating_point()]
        given, structure = pytree.tree_flatten((args, kwargs))
        moving = {i: _primal(t) for i, t in enumerate(given) if isinstance(t, Tensor) and _moves(t)}
        if not floats or not moving or any(_moves(t) for t in floats):
            return False
        leaves = [moving[i].detach().clone().requires_grad_() if i in moving else t for i, t in enumerate(given)]
        own_args, own_kwargs = pytree.tree_unflatten(leaves, structure)
    try:
        again = func(*own_args, **own_kwargs)
    except Exception:  # such as a write in place to a leaf
        return False
    return any(isinstance(t, Tensor) and t.requires_grad and not t.is_leaf for t in pytree.tree_leaves(again))


@contextmanager
def _hooked(split: Split, search: _Search) -> Iterator[None]:
    """Compare every call of a module of the trunk."""
    calls: list[_Call] = []
    handles = []

    def enter(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not search.paused:
                calls.append(_Call.of(module, args, kwargs, split.observed))
                search.operators.stack.append(name)

        return hook

    def leave(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
            if not search.paused:
                search.compare(name, labelled(name, module), calls.pop(), output)
                search.operators.stack.pop()

        return hook

    for name, module in split.trunk.named_modules():
        handles.append(module.register_forward_pre_hook(enter(name), with_kwargs=True))
        handles.append(module.register_forward_hook(leave(name), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def joined(value: Any, read: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Return the floating-point tensors of a value in one vector, in double precision."""
    floats = [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor) and t.is_floating_point()]
    parts = [(t if read is None else read(t)).flatten().double() for t in floats]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


def _moves(value: Tensor) -> bool:
    return forward_ad.unpack_dual(value).tangent is not None


def _primal(value: Tensor) -> Tensor:
    primal: Tensor = forward_ad.unpack_dual(value).primal
    return primal


def _tangent(value: Tensor) -> Tensor:
    primal, tangent = forward_ad.unpack_dual(value)
    return torch.zeros_like(primal) if tangent is None else tangent


def _moved(value: Tensor, t: float) -> Tensor:
    primal: Tensor = forward_ad.unpack_dual(value).primal
    return primal + t * _tangent(value) if _moves(value) else primal
