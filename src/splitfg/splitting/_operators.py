"""Words for a forward-mode pass that failed: which operator of which module has no rule, and what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import jvp
from torch.utils import _pytree as pytree

from splitfg.errors import SplitError
from splitfg.splitting._call import call, places_of
from splitfg.splitting._split import Split
from splitfg.types import Inputs

# Fused operators that torch's own modules take in evaluation mode, and the modules that take them.
_FAST_PATHS: dict[str, tuple[type[nn.Module], ...]] = {
    "_transformer_encoder_layer_fwd": (nn.TransformerEncoderLayer,),
    "_native_multi_head_attention": (nn.MultiheadAttention,),
}
_MATH = "run it under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"


@contextmanager
def explained(split: Split, x: Inputs) -> Iterator[None]:
    """Words for a forward-mode pass of the trunk that fails in here."""
    try:
        yield
    except (NotImplementedError, RuntimeError) as error:
        problem = explain(error, split, x)
        if problem is None:
            raise
        raise problem from error


def explain(error: Exception, split: Split, x: Inputs) -> SplitError | None:
    """What a failed forward-mode pass was about, if it can be told."""
    message = str(error)
    if "data pointer" in message:
        return SplitError(
            [
                "the trunk leaves torch on the way (for numpy, say), where forward mode cannot follow: use"
                " CentralDifference() as engine, or make it a BlackBoxTrunk"
            ]
        )
    if "forward AD" not in message and "vmap" not in message:
        return None
    found = _fast_path_problems(message, split) or operator_problems(split, x)
    return SplitError(found) if found else None


def operator_problems(split: Split, x: Inputs) -> list[str]:
    """Every module of the trunk that uses an operator without a forward-mode rule, innermost modules only.

    Each module is run once with the inputs it gets, and then differentiated forward on its own.
    """
    found: dict[str, str] = {}
    for name, module, args, kwargs in reversed(list(_calls(split, x))):
        inside = any(other.startswith(f"{name}.") or not name for other in found)
        problem = None if inside else _forward_mode_problem(module, args, kwargs)
        if problem:
            found[name] = f"{_label(name, module)}: {problem}"
    return list(found.values())


def _fast_path_problems(message: str, split: Split) -> list[str]:
    """The modules whose fast path failed: looking at them one by one would keep them from taking it."""
    operator = next((name for name in _FAST_PATHS if name in message), None)
    if operator is None:
        return []
    return [
        f"{_label(name, module)}: its fast path for evaluation, {operator}, has no forward-mode rule: switch it off"
        f" with torch.backends.mha.set_fastpath_enabled(False), and {_MATH}"
        for name, module in split.trunk.named_modules()
        if isinstance(module, _FAST_PATHS[operator])
    ]


def _label(name: str, module: nn.Module) -> str:
    return f"{name or 'the trunk'} ({type(module).__name__})"


def _calls(split: Split, x: Inputs) -> Iterator[tuple[str, nn.Module, tuple[Any, ...], dict[str, Any]]]:
    """Every call of a module of the trunk, in the order they begin: name, module, arguments by place and by name."""
    seen: list[tuple[str, nn.Module, tuple[Any, ...], dict[str, Any]]] = []
    handles = [
        module.register_forward_pre_hook(
            lambda m, args, kwargs, name=name: seen.append((name, m, args, kwargs)), with_kwargs=True
        )
        for name, module in split.trunk.named_modules()
    ]
    try:
        split.h(x)
    finally:
        for handle in handles:
            handle.remove()
    yield from seen


def _forward_mode_problem(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Why this module cannot be differentiated forward, or None if it can."""
    params = {name: p.detach() for name, p in module.named_parameters()}
    leaves, structure = pytree.tree_flatten((args, kwargs))
    floats = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]

    def run(params: dict[str, Tensor], *moving: Tensor) -> list[Tensor]:
        filled = list(leaves)
        for i, value in zip(floats, moving, strict=True):
            filled[i] = value
        own_args, own_kwargs = pytree.tree_unflatten(filled, structure)
        given = call(module, params, own_args, own_kwargs, places=places_of(module))
        return [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor)]

    primals = (params, *(leaves[i].detach() for i in floats))
    try:
        with torch.no_grad():
            jvp(run, primals, pytree.tree_map(torch.ones_like, primals))
    except (NotImplementedError, RuntimeError) as error:
        return _worded(str(error))
    return None


def _worded(message: str) -> str:
    operator = re.search(r"forward AD with (\S+) that does not support it", message)
    if operator is None:
        return f"cannot be differentiated forward ({message.splitlines()[0]})"
    advice = "write it with operators that have one, or use CentralDifference() where the estimator takes an engine"
    if "attention" in operator[1]:
        advice = f"{_MATH}, or write attention as matmul and softmax"
    return f"the operator {operator[1]} has no forward-mode rule: {advice}"
