"""Running a module on other parameters than its own, wherever and as often as it uses them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, TypeAlias

from torch import nn
from torch.func import functional_call

from splitfg.types import Params

Places: TypeAlias = Mapping[str, tuple[str, ...]]
"""From a parameter's name to all places where it is read, one for every module that holds it."""


def places_of(module: nn.Module) -> Places:
    """Where parameters are read that have several places; nothing where every one has a single place.

    A module that is registered twice is one place: torch would put a parameter there twice, and on the way back leave
    the second one in place of the first.
    """
    held, modules = defaultdict(list), 0
    for name, part in module.named_modules():  # each module once
        modules += 1
        for leaf, p in part._parameters.items():
            if p is not None:
                held[id(p)].append(f"{name}.{leaf}" if name else leaf)
    registered = sum(1 for _ in module.named_modules(remove_duplicate=False))
    if modules == registered and all(len(places) == 1 for places in held.values()):
        return {}
    return {name: tuple(held[id(p)]) for name, p in module.named_parameters()}


def call(
    module: nn.Module, params: Params, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, *, places: Places
) -> Any:
    """What a module gives with these parameters in place of its own, and the rest as it is.

    Args:
        module: Left as it was.
        params: Keyed by the module's own names.
        args: What it is called with.
        kwargs: Likewise, by name.
        places: Of the module, from :func:`places_of`.
    """
    if not places:
        return functional_call(module, params, args, kwargs)
    placed = {place: p for name, p in params.items() for place in places.get(name, (name,))}
    return functional_call(module, placed, args, kwargs, tie_weights=False)
