"""Backward rules and hooks that make backprop's gradient another one than the derivative of h."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from splitfg.errors import shorten
from splitfg.splitting._graph import custom_functions
from splitfg.splitting._lost_tangents import OF_HOOKS, wrong_rules
from splitfg.splitting._replace import labelled
from splitfg.splitting._split import Split
from splitfg.types import Inputs, Params


def warn_unreached() -> None:
    """Warn that no trained parameter of the trunk has an effect on h."""
    warnings.warn(
        "h depends on none of the trunk's trained parameters in this batch, so that their gradient is zero: check which"
        " parameters require a gradient, and call unmerge_adapter() if adapters of peft are merged",
        stacklevel=2,
    )


def warn_of_hooks(split: Split, x: Inputs) -> list[str]:
    """Warn of hooks on the backward pass, which estimators do not make; returns no problems.

    Hooks of modules and parameters are registered beforehand. Those that a forward pass registers on tensors show in
    one pass that builds a graph without saved tensors, so that its memory does not grow with depth.
    """
    found = [labelled(name, module) for name, module in split.trunk.named_modules() if _has_hooks(module)]
    trained = split.trunk_params()
    found += [name for name, p in split.model.named_parameters() if name in trained and _is_hooked(p)]
    with suppress(NotImplementedError, RuntimeError), _HooksOfTensors() as tensors:
        _graph(split, x)
    found += [f"tensors in {', '.join(tensors.places)}"] if tensors.places else []
    if found:
        warnings.warn(
            f"backward hooks of {shorten(found)} do not run, because this estimator makes no backward pass: if they"
            " change gradients, change .grad after the step's write_grads instead",
            stacklevel=2,
        )
    return []


def rule_problems(split: Split, x: Inputs, v: Params, dtype: torch.dtype) -> list[str]:
    """List modules with a ``torch.autograd.Function`` whose backward is not the transpose of its jvp.

    Makes a pass without saved tensors, and compares modules one by one only if the trunk calls such a function.

    Args:
        split: The network.
        x: Inputs.
        v: Direction, by parameter name.
        dtype: Precision of the computation.
    """
    h, _ = _graph(split, x)
    return wrong_rules(split, x, v, dtype) if custom_functions(h) - {OF_HOOKS} else []


def whole_problems(split: Split, x: Inputs, v: Params, dh: Tensor, measured: Tensor) -> list[str]:
    """List the problem that J v is neither the measured derivative nor backprop's, although no module is to blame.

    With the difference c = J v - (measured), <c, J v> - <Jᵀ c, v> is ‖c‖² if backprop computes the measured derivative,
    and zero if it agrees with J v, as for straight-through functions. Makes one reverse pass.
    """
    c = dh.double() - measured
    excess = float((c * dh.double()).sum()) - _backward(split, x, v, c)
    if not excess > 0.5 * float(c.square().sum()):
        return []
    far = float(c.norm() / measured.norm().clamp_min(torch.finfo(torch.float64).tiny))
    return [
        f"J·v of the trunk is not its derivative (relative error {far:.2g} against a finite difference, from which"
        " backprop does not differ): use engine=CentralDifference(), or, to train with it as it is, pass check=False"
        " to split() or Split()"
    ]


def _backward(split: Split, x: Inputs, v: Params, c: Tensor) -> float:
    """Return <Jᵀ c, v> by one reverse pass."""
    h, leaves = _graph(split, x, saved=True)
    cotangent = c.reshape(h.shape).to(h.dtype)
    grads = torch.autograd.grad(h, list(leaves.values()), cotangent, allow_unused=True, materialize_grads=True)
    return sum(float((g.double() * v[n].double()).sum()) for n, g in zip(leaves, grads, strict=True))


def _graph(split: Split, x: Inputs, *, saved: bool = False) -> tuple[Tensor, Params]:
    """Return h with the graph of reverse mode, without saved tensors by default, and the leaves of the graph."""
    leaves = {name: p.detach().requires_grad_() for name, p in split.trunk_params().items()}
    f = split.trunk_function(x, for_reverse_mode=True)
    with torch.enable_grad():
        if saved:
            return f(leaves), leaves
        with torch.autograd.graph.saved_tensors_hooks(lambda _: None, _never):
            return f(leaves), leaves


def _never(_: None) -> Tensor:
    raise RuntimeError("this graph has no saved tensors")


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._backward_hooks or module._backward_pre_hooks)


def _is_hooked(p: Any) -> bool:
    return bool(p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None))


class _HooksOfTensors(TorchFunctionMode):
    """Records the functions in which a forward pass registers hooks on tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[str, None] = {}

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.register_hook:
            self.places[str(getattr(args[1], "__qualname__", "a hook"))] = None
        return func(*args, **(kwargs or {}))
