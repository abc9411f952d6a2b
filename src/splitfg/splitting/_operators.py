"""Error messages for failed forward-mode passes: the operator without a rule, its module, and the cure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import jvp
from torch.utils import _pytree as pytree

from splitfg.calling import call, places_of, preserved
from splitfg.errors import SplitError, shorten
from splitfg.splitting._dtypes import is_about_dtypes, tangent_problem
from splitfg.splitting._kernels import tangent_kernels
from splitfg.splitting._replace import labelled
from splitfg.splitting._split import Split
from splitfg.types import Inputs

_SPARSE = "forward mode does not take sparse tensors: use x.to_dense(), or engine=CentralDifference()"


@contextmanager
def explained(split: Split, x: Inputs) -> Iterator[None]:
    """Turn errors of a forward-mode pass through the trunk into a :class:`SplitError` with the cause and the cure."""
    try:
        yield
    except (NotImplementedError, RuntimeError) as error:
        problem = explain(error, split, x)
        if problem is None:
            raise
        raise problem from error


def explain(error: Exception, split: Split, x: Inputs) -> SplitError | None:
    """Explain the error of a forward-mode pass; ``None`` if its cause is unknown."""
    message = str(error)
    if "data pointer" in message:
        return SplitError(
            [
                "the trunk reads the memory of tensors, as a conversion to numpy and pack_padded_sequence do, which"
                " forward mode cannot follow: use engine=CentralDifference(), pad sequences without packing them, or"
                " wrap it in a BlackBoxTrunk"
            ]
        )
    if "Sparse" in message:
        return SplitError([_SPARSE])
    if "divisible by 2" in message:
        return SplitError(
            [
                "torch.view_as_complex does not take tangents, which lie at odd places in memory: use"
                " torch.complex(p[..., 0], p[..., 1]) instead"
            ]
        )
    names = ("forward AD", "forward mode AD", "functorch", "vmap")
    if not is_about_dtypes(message) and not any(words in message for words in names):
        return None
    found = operator_problems(split, x) or _batching_problems(message)
    return SplitError(found) if found else None


def _batching_problems(message: str) -> list[str]:
    """Explain an operator that takes one tangent but not several at once."""
    function = re.search(r"vmap over (\w+), but it does not have vmap support", message)
    if function is not None:
        cure = "set generate_vmap_rule = True in the class, or use engine=ForwardMode(chunk=1)"
        return [f"{function[1]}, a torch.autograd.Function, takes one tangent at a time: {cure}"]
    if "vmap" not in message:
        return []
    operator = re.search(r"aten::\w+", message)
    words = f"({message.splitlines()[0]})" if operator is None else f"through {operator[0]}"
    return [f"torch cannot push several tangents at once {words}: use engine=ForwardMode(chunk=1)"]


def operator_problems(split: Split, x: Inputs) -> list[str]:
    """List the innermost modules of the trunk that use an operator without a forward-mode rule.

    Records the arguments of every module in one forward pass, then differentiates each module by itself. Modules with
    the same cause share one problem.
    """
    found: set[str] = set()
    places: dict[str, list[str]] = {}
    with preserved(split.trunk):
        for name, module, args, kwargs in reversed(list(_calls(split, x))):
            inside = any(other.startswith(f"{name}.") or not name for other in found)
            problem = None if inside else _forward_mode_problem(split, module, args, kwargs)
            if problem:
                found.add(name)
                places.setdefault(problem, []).insert(0, labelled(name, module))
    return [f"{shorten(list(dict.fromkeys(labels)))}: {problem}" for problem, labels in places.items()]


def _calls(split: Split, x: Inputs) -> Iterator[tuple[str, nn.Module, tuple[Any, ...], dict[str, Any]]]:
    """Yield every call of a module of the trunk, in order: name, module, positional and keyword arguments."""
    recorded: list[tuple[str, nn.Module, tuple[Any, ...], dict[str, Any]]] = []
    handles = [
        module.register_forward_pre_hook(
            lambda m, args, kwargs, name=name: recorded.append((name, m, args, kwargs)), with_kwargs=True
        )
        for name, module in split.trunk.named_modules()
    ]
    try:
        split.h(x)
    finally:
        for handle in handles:
            handle.remove()
    yield from recorded


def _forward_mode_problem(split: Split, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Explain why forward mode fails on this module, or return ``None`` if it works."""
    params = {name: p.detach() for name, p in module.named_parameters()}
    leaves, structure = pytree.tree_flatten((args, kwargs))
    floats = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]

    def run(params: dict[str, Tensor], *moving: Tensor) -> list[Tensor]:
        filled = list(leaves)
        for i, value in zip(floats, moving, strict=True):
            filled[i] = value
        own_args, own_kwargs = pytree.tree_unflatten(filled, structure)
        with tangent_kernels(module):
            given = call(module, params, own_args, own_kwargs, places=places_of(module), observed=split.observed)
        return [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor)]

    primals = (params, *(leaves[i].detach() for i in floats))
    try:
        with torch.no_grad():
            pushed: Any = jvp(run, primals, pytree.tree_map(torch.ones_like, primals))
    except (NotImplementedError, RuntimeError) as error:
        return _worded(str(error))
    return tangent_problem(*pushed)


def _worded(message: str) -> str:
    operator = re.search(r"forward AD with (\S+) that does not support it", message)
    if "autograd.Function" in message:
        return (
            "a torch.autograd.Function has no forward-mode rule: give it setup_context and jvp, or use"
            " engine=CentralDifference(); switch gradient checkpointing off, which saves nothing without a backward"
            " pass (gradient_checkpointing_disable(), or use_reentrant=False)"
        )
    if "Sparse" in message:
        return _SPARSE
    if ".data" in message:
        return (
            "its forward pass writes to .data, as module.to(...) does, which forward mode cannot follow: do so before"
            " training, or use engine=CentralDifference()"
        )
    if operator is None:
        return f"forward mode fails ({message.splitlines()[0]}): use engine=CentralDifference()"
    advice = "rewrite it with operators that have one, or use engine=CentralDifference() if the estimator takes one"
    if "attention" in operator[1]:
        advice = "call F.scaled_dot_product_attention, or rewrite attention as matmul and softmax"
    return f"the operator {operator[1]} has no forward-mode rule: {advice}"
