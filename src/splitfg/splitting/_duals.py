"""Passes with tangents through a trunk, and the calls of its modules in them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from splitfg.calling import Observed, RandomState, call, drawing_from, eager_code, places_of, random_state
from splitfg.numerics import derivative_rounding
from splitfg.splitting._graph import custom_functions
from splitfg.splitting._split import Split
from splitfg.types import Inputs, Params, TrunkFunction


def without_graph(split: Split, x: Inputs) -> TrunkFunction:
    """Return θ ↦ h with inputs and all other parameters detached: passes with gradients enabled build no graph."""
    f = split.trunk_function(pytree.tree_map_only(Tensor, Tensor.detach, x))
    rest = split.all_trunk_params()
    return lambda params: f({**rest, **params})


@contextmanager
def dual_pass(split: Split, v: Params) -> Iterator[Params]:
    """Enter forward mode and give the trunk's parameters with the tangents v; compiled functions run in eager code."""
    with forward_ad.dual_level(), eager_code():
        yield {name: forward_ad.make_dual(p, v[name]) for name, p in split.trunk_params().items()}


@dataclass(eq=False)
class Call:
    """One call of a module under forward mode: its moving inputs and parameters, and their tangents.

    Runs of the call draw the same random numbers, such as one dropout mask, and start from the same buffers.
    """

    module: nn.Module
    leaves: list[Any]
    structure: Any
    params: Params
    written: Params
    observed: Observed
    random: RandomState

    @classmethod
    def of(cls, module: nn.Module, args: Any, kwargs: Any, observed: Observed) -> Call:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        # a copy, since the module may write to its inputs
        leaves = [t.clone() if isinstance(t, Tensor) else t for t in leaves]
        buffers = dict(module.named_buffers())
        written = {name: buffers[name].clone() for name in observed.names(module)}
        return cls(module, leaves, structure, dict(module.named_parameters()), written, observed, random_state())

    def at(self, t: float) -> Tensor:
        """Run the module with inputs and parameters moved by t times their tangents."""
        return self.run(lambda value: _moved(value, t))

    def run(self, change: Callable[[Tensor], Tensor]) -> Tensor:
        """Run the module with changed inputs and parameters, and return its outputs in one vector."""
        args, kwargs = pytree.tree_unflatten(
            [change(t) if isinstance(t, Tensor) else t for t in self.leaves], self.structure
        )
        params = {name: change(p) for name, p in self.params.items()}
        params.update({name: change(b).clone() for name, b in self.written.items()})
        with drawing_from(self.random):
            found = call(self.module, params, args, kwargs, places=places_of(self.module), observed=self.observed)
        return joined(found)


@contextmanager
def each_call(split: Split, leave: Callable[[str, nn.Module, Call, Any], None]) -> Iterator[None]:
    """Report every call of a module of the trunk when it ends, inner modules first.

    Args:
        split: The network.
        leave: Takes the module's name, the module, the call and the module's return value. Calls that it makes itself
            are not reported.
    """
    calls: list[Call] = []
    handles, busy = [], False

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        if not busy:
            calls.append(Call.of(module, args, kwargs, split.observed))

    def after(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
            nonlocal busy
            if busy:
                return
            busy = True
            try:
                leave(name, module, calls.pop(), output)
            finally:
                busy = False

        return hook

    for name, module in split.trunk.named_modules():
        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(module.register_forward_hook(after(name), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# Random cotangents of a comparison: an error is missed if it is nearly orthogonal to all of them.
_COTANGENTS = 3


@dataclass(frozen=True, eq=False)
class Pulled:
    """Reverse mode through one call of a module.

    Attributes:
        cotangents: Random c ~ N(0, I), each of the shape of the outputs in one vector.
        products: <Jᵀ c, tangents> of every c; ``None`` if all Jᵀ c are zero: for reverse mode, the outputs do not
            depend on the moving inputs.
        functions: Names of the ``torch.autograd.Function`` classes on the way.
    """

    cotangents: list[Tensor]
    products: list[float] | None
    functions: set[str]

    def agrees(self, tangent: Tensor, dtype: torch.dtype) -> bool:
        """Whether an output's tangent has the products of reverse mode: |<c, tangent - J v>| ≤ ε ‖tangent‖."""
        tangent = tangent.double()
        error = derivative_rounding(dtype, tangent.device)
        pairs = zip(self.cotangents, self.products or [0.0] * len(self.cotangents), strict=True)
        differences = [abs(float((c.double() * tangent).sum()) - product) for c, product in pairs]
        size = max([float(tangent.norm()), *(abs(product) for product in self.products or ())])
        return max(differences) <= error * size


def pulled(seen: Call) -> Pulled:
    """Run a call once more with a graph, and pull random cotangents back through it."""
    leaves: list[tuple[Tensor, Tensor]] = []

    def leaf(value: Tensor) -> Tensor:
        primal, tangent = primal_of(value).detach().clone(), tangent_of(value)
        if not moves(value):
            return primal
        leaves.append((primal.requires_grad_(), tangent))
        return primal * 1  # modules may write to their inputs

    with torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of operators without a backward rule
        output = seen.run(leaf)
        draws = torch.Generator().manual_seed(1)
        cotangents = [torch.randn(output.shape, generator=draws).to(output.detach()) for _ in range(_COTANGENTS)]
        if not output.requires_grad:
            return Pulled(cotangents, None, set())
        pulls = [_pull(output, [primal for primal, _ in leaves], c) for c in cotangents]
    tangents = [tangent.double() for _, tangent in leaves]
    products = [sum(float((g * t).sum()) for g, t in zip(grads, tangents, strict=True)) for grads in pulls]
    zero = not any(bool(g.any()) for grads in pulls for g in grads)
    return Pulled(cotangents, None if zero else products, custom_functions(output))


def _pull(output: Tensor, leaves: list[Tensor], c: Tensor) -> list[Tensor]:
    options = {"allow_unused": True, "materialize_grads": True, "retain_graph": True}
    return [g.double() for g in torch.autograd.grad(output, leaves, c, **options)]


def joined(value: Any, read: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Return the floating-point tensors of a value in one vector, in double precision."""
    floats = [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor) and t.is_floating_point()]
    parts = [(t if read is None else read(t)).flatten().double() for t in floats]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


def moves(value: Tensor) -> bool:
    """Whether a tensor carries a tangent."""
    return forward_ad.unpack_dual(value).tangent is not None


def primal_of(value: Tensor) -> Tensor:
    """Return a tensor without its tangent; both share memory."""
    primal: Tensor = forward_ad.unpack_dual(value).primal
    return primal


def tangent_of(value: Tensor) -> Tensor:
    """Return the tangent of a tensor; zeros if it has none."""
    primal, tangent = forward_ad.unpack_dual(value)
    return torch.zeros_like(primal) if tangent is None else tangent


def _moved(value: Tensor, t: float) -> Tensor:
    primal: Tensor = forward_ad.unpack_dual(value).primal
    return primal + t * tangent_of(value) if moves(value) else primal
