"""Traces of a trunk's passes, kept by their dependencies."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Generic, TypeVar

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from splitfg.splitting import Split
from splitfg.types import Inputs

T = TypeVar("T")

_MOST = 4
"""Traces that differ in attributes alone, before the trunk runs in eager code."""
_TORCHS_OWN = frozenset(vars(nn.Module())) - {"training"}
"""Attributes that torch gives every module; parameters and buffers are no constants of a trace."""
_DEPTH = 3
"""Depth to which containers among the attributes are searched."""


class PassTraces(Generic[T]):
    """Traces by the shapes and settings that they depend on, and by attributes and buffers of the trunk's modules.

    A trunk that cannot be traced, or whose attributes change from pass to pass, has no trace: it runs in eager code,
    with a warning. Other values in the same buffer need no new trace; another buffer in its place does.
    """

    def __init__(self) -> None:
        self._made: dict[Hashable, tuple[T | None, tuple[Tensor, ...]]] = {}
        self._counts: Counter[Hashable] = Counter()

    def get(self, split: Split, x: Inputs, further: Hashable, trace: Callable[[], T]) -> T | None:
        """Return the trace of a pass, made if there is none yet; ``None`` if the trunk must run in eager code.

        Args:
            split: The network.
            x: Inputs.
            further: What else the trace depends on.
            trace: Makes the trace.
        """
        if split.traits(x).random:
            return None  # a trace draws its own masks, from torch's global generator
        base = (further, *_pass_facts(split, x))
        constants, held = constants_of(chain(split.model.modules(), split.trunk.modules()))
        key = (base, constants)
        if key not in self._made:
            self._counts[base] += 1
            made = _traced_or_none(trace) if self._counts[base] <= _MOST else None
            if self._counts[base] == _MOST + 1:
                words = "attributes or buffers of the trunk change from pass to pass, unseen by compiled code"
                warnings.warn(f"{words}: the trunk runs in eager code", stacklevel=4)
            if self._counts[base] > _MOST:
                return None
            self._made[key] = made, held
        return self._made[key][0]


def constants_of(modules: Iterable[nn.Module]) -> tuple[Hashable, tuple[Tensor, ...]]:
    """Return the constants of a trace of modules: their buffers, and numbers, texts and tensors in attributes.

    Returns:
        A key that tells constants apart, and the tensors whose ids it holds. An id is unique only among tensors that
        exist: keep the tensors as long as the key.
    """
    found: list[bool | int | float | str | Tensor] = []
    for module in modules:
        attributes = [value for name, value in vars(module).items() if name not in _TORCHS_OWN]
        leaves = (leaf for value in attributes for leaf in _leaves(value))
        found += [leaf for leaf in leaves if isinstance(leaf, bool | int | float | str | Tensor)]
        found += module.buffers(recurse=False)
    key = tuple(id(value) if isinstance(value, Tensor) else value for value in found)
    return key, tuple(value for value in found if isinstance(value, Tensor))


def _leaves(value: Any, depth: int = _DEPTH) -> Iterator[Any]:
    """Yield a value, or the values inside containers and plain objects; modules are visited by themselves."""
    inside: Iterable[Any] | None = None
    if isinstance(value, dict):
        inside = value.values()
    elif isinstance(value, list | tuple):
        inside = value
    elif hasattr(value, "__dict__") and not isinstance(value, Tensor | nn.Module | type) and not callable(value):
        inside = vars(value).values()
    if inside is None or depth == 0:
        yield value
        return
    for part in list(inside):
        yield from _leaves(part, depth - 1)


def tensors_of(x: Inputs) -> list[Tensor]:
    """Return the tensors of inputs, in order."""
    return [leaf for leaf in pytree.tree_leaves(x) if isinstance(leaf, Tensor)]


def with_tensors(x: Inputs, tensors: Sequence[Tensor]) -> Inputs:
    """Return inputs with other tensors."""
    leaves, structure = pytree.tree_flatten(x)
    left = iter(tensors)
    filled: Inputs = pytree.tree_unflatten([next(left) if isinstance(v, Tensor) else v for v in leaves], structure)
    return filled


def plain_fact(leaf: Any) -> Hashable:
    """Return a value of the inputs that is no tensor, or its text if it cannot be hashed."""
    return leaf if isinstance(leaf, Hashable) else repr(leaf)


def _pass_facts(split: Split, x: Inputs) -> tuple[Hashable, ...]:
    """Return the dependencies of a trace of the trunk, beside the values of parameters and inputs."""
    leaves, structure = pytree.tree_flatten(x)
    facts = tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else plain_fact(leaf) for leaf in leaves)
    dtypes = tuple(p.dtype for p in split.all_trunk_params().values())
    trained = tuple(split.trunk_params())
    return split.training_flags(), structure, facts, dtypes, trained


def _traced_or_none(trace: Callable[[], T]) -> T | None:
    """Return the trace of a trunk, or warn and return ``None`` if the trunk cannot be traced."""
    try:
        return trace()
    except RuntimeError as error:
        words = "the trunk cannot be traced for compiling, and runs in eager code"
        warnings.warn(f"{words}: {str(error).splitlines()[0]}", stacklevel=5)
        return None
