"""Validation that no tangent passes through a ``torch.no_grad()`` block of a trunk."""

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


def no_grad_problems(split: Split, x: Inputs) -> list[str]:
    """List modules with a ``torch.no_grad()`` block through which a tangent reaches h.

    Backprop treats the results of such a block as constants, and forward mode does not. Compares J·v with and without
    the tangents that leave these blocks; blocks that h does not depend on, such as updates of statistics, are fine.
    Stores nothing for a backward pass.
    """
    watching = _Watching(drop=False)
    try:
        passed = _pushed(split, x, watching)
        if not watching.modules:
            return []
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
        self.stack: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.is_grad_enabled():
            return result
        with torch._C.DisableTorchFunction():
            if any(_has_tangent(leaf) for leaf in pytree.tree_leaves(result)):
                self.modules[self.stack[-1] if self.stack else "the trunk"] = None
                return pytree.tree_map(_without_tangent, result) if self.drop else result
        return result


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
