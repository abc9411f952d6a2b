"""Validation that tangents pass where gradients do: operators without a rule, and ``torch.no_grad()`` blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from splitfg.splitting._split import Split
from splitfg.types import Inputs


def tangent_problems(split: Split, x: Inputs) -> list[str]:
    """List places of a trunk where forward mode and backprop compute different derivatives.

    Operators with a backward rule alone, such as a ``torch.library.custom_op``, lose tangents. Backprop treats the
    results of a ``torch.no_grad()`` block as constants, and forward mode does not: compares J·v with and without the
    tangents that leave these blocks, so that blocks that h does not depend on pass, such as updates of statistics.
    Differentiates backward through single operators only, so that memory does not grow with depth.
    """
    watching = _Watching(drop=False)
    try:
        passed = _pushed(split, x, watching)
        if watching.lost or not watching.modules:
            return list(watching.lost.values())
        dropped = _pushed(split, x, _Watching(drop=True))
    except Exception:  # the estimator's own pass explains operators without a forward-mode rule
        return []
    if torch.allclose(passed, dropped, rtol=1e-3, atol=1e-5 * float(passed.abs().max())):
        return []
    return [
        f"{', '.join(watching.modules)}: a tangent passes through torch.no_grad(), whose results backprop treats as"
        " constants, so that J·v would not be its derivative: use .detach() on the results in place of torch.no_grad(),"
        " or remove it to differentiate them"
    ]


class _Watching(TorchFunctionMode):
    """Records the modules that compute with tangents while gradients are disabled.

    Args:
        drop: Whether to drop the tangents of the results.
    """

    def __init__(self, *, drop: bool) -> None:
        super().__init__()
        self.drop = drop
        self.modules: dict[str, None] = {}
        self.lost: dict[str, str] = {}
        self.stack: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.is_grad_enabled():
            if _loses_tangent(func, args, kwargs or {}, result):
                place = self.stack[-1] if self.stack else "the trunk"
                self.lost.setdefault(str(func), _lost(place, str(func)))
            return result
        with torch._C.DisableTorchFunction():
            if any(_has_tangent(leaf) for leaf in pytree.tree_leaves(result)):
                self.modules[self.stack[-1] if self.stack else "the trunk"] = None
                return pytree.tree_map(_without_tangent, result) if self.drop else result
        return result


def _loses_tangent(func: Any, args: Any, kwargs: Any, result: Any) -> bool:
    """Whether an operator drops the tangents of its arguments although backprop differentiates it."""
    with torch._C.DisableTorchFunction():
        floats = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor) and t.is_floating_point()]
        given, structure = pytree.tree_flatten((args, kwargs))
        moving = {i: _without_tangent(t) for i, t in enumerate(given) if _has_tangent(t)}
        if not floats or not moving or any(_has_tangent(t) for t in floats):
            return False
        leaves = [moving[i].detach().clone().requires_grad_() if i in moving else t for i, t in enumerate(given)]
        own_args, own_kwargs = pytree.tree_unflatten(leaves, structure)
    try:
        again = func(*own_args, **own_kwargs)
    except Exception:  # such as a write in place to a leaf
        return False
    return any(isinstance(t, Tensor) and t.requires_grad and not t.is_leaf for t in pytree.tree_leaves(again))


def _lost(place: str, operator: str) -> str:
    return (
        f"{place}: the operator {operator} has a backward rule and no forward-mode rule, and drops tangents without an"
        " error: use engine=CentralDifference(), or write it with operators that have one, such as a"
        " torch.autograd.Function with jvp"
    )


def _has_tangent(value: Any) -> bool:
    return isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None


def _without_tangent(value: Any) -> Any:
    return forward_ad.unpack_dual(value).primal if isinstance(value, Tensor) else value


def _pushed(split: Split, x: Inputs, watching: _Watching) -> Tensor:
    """Return J·v for a random v of the parameters' size."""
    draws = torch.Generator().manual_seed(0)
    with torch.enable_grad(), forward_ad.dual_level():
        duals = {}
        for name, p in split.trunk_params().items():
            v = torch.randn(p.shape, generator=draws).to(p)
            duals[name] = forward_ad.make_dual(p, v * p.norm() / max(p.numel(), 1) ** 0.5)
        with _named(split.trunk, watching.stack), watching:
            h = split.trunk_function(x)(duals)
        tangent = forward_ad.unpack_dual(h).tangent
        return torch.zeros_like(h) if tangent is None else tangent.detach().clone()


@contextmanager
def _named(trunk: nn.Module, stack: list[str]) -> Iterator[None]:
    """Keep the names of the modules that are running on a stack."""
    handles = []
    for name, module in trunk.named_modules():
        label = f"{name or 'the trunk'} ({type(module).__name__})"
        handles.append(module.register_forward_pre_hook(lambda *_, label=label: stack.append(label)))
        handles.append(module.register_forward_hook(lambda *_: stack.pop() and None))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
