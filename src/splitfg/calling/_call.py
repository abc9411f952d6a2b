"""Functional calls of modules that share parameters."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrize

from splitfg.calling._effects import Observed, copies
from splitfg.calling._restore import restored
from splitfg.types import Params

Places: TypeAlias = Mapping[str, tuple[str, ...]]
"""Maps a parameter's name to every qualified name under which a module holds it."""


def places_of(module: nn.Module) -> Places:
    """Return every place at which each parameter is held; empty if no parameter or module is shared.

    A module that is registered twice counts as one place: ``functional_call`` would swap its parameter twice and
    restore the swapped-in value instead of the original.
    """
    held, modules = defaultdict(list), 0
    for name, part in module.named_modules():  # yields each module once
        modules += 1
        for leaf, p in part._parameters.items():
            if p is not None:
                held[id(p)].append(f"{name}.{leaf}" if name else leaf)
    registered = sum(1 for _ in module.named_modules(remove_duplicate=False))
    if modules == registered and all(len(places) == 1 for places in held.values()):
        return {}
    return {name: tuple(held[id(p)]) for name, p in module.named_parameters()}


@contextmanager
def eager_parts(module: nn.Module) -> Iterator[bool]:
    """Run parts that the user has compiled in eager code: compiled code ignores hooks that are added later.

    Gives whether there are any.
    """
    if torch.compiler.is_compiling() or not any(_is_compiled(part) for part in module.modules()):
        yield False
        return
    with eager_code():
        yield True


@contextmanager
def eager_code() -> Iterator[None]:
    """Run compiled functions in eager code; does not load torch's compiler, without which there are none."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def _is_compiled(module: nn.Module) -> bool:
    return type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None


@contextmanager
def computed_anew() -> Iterator[None]:
    """Compute parametrized weights anew inside ``parametrize.cached()``, which holds those of earlier passes."""
    if torch.compiler.is_compiling() or not parametrize._cache_enabled:
        yield
        return
    kept, parametrize._cache_enabled = parametrize._cache_enabled, 0
    try:
        yield
    finally:
        parametrize._cache_enabled = kept


def call(
    module: nn.Module,
    params: Params,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    places: Places,
    observed: Observed | None = None,
    written: Sequence[str] | None = None,
    strict: bool = False,
) -> Any:
    """Call a module with these parameters in place of its own, and restore what the call assigns in the module.

    Args:
        module: The module; its own parameters stay unchanged.
        params: Replacements keyed by the module's names; other parameters keep their values.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        places: The module's :func:`places_of`.
        observed: Observations of earlier passes: the call writes to copies of the buffers that they wrote to.
        written: Names of these buffers, if the call may be compiled, which cannot ask for them.
        strict: Whether a write in place to another buffer raises an error.

    Returns:
        The module's return value.

    Raises:
        SplitError: There is such a write.
    """
    with restored(module, observed=observed, strict=strict), eager_parts(module), computed_anew():
        if not torch.compiler.is_compiling():
            written = () if observed is None else observed.names(module)
        params = {**copies(module, written or ()), **params}
        if not places:
            return functional_call(module, params, args, kwargs)
        placed = {place: p for name, p in params.items() for place in places.get(name, (name,))}
        return functional_call(module, placed, args, kwargs, tie_weights=False)
