"""Values in nested tuples, lists and dicts, as the arguments and outputs of an operation hold them."""

from __future__ import annotations

from collections.abc import Callable
from types import EllipsisType, NoneType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_PLAIN = frozenset({bool, int, float, complex, str, slice, NoneType, EllipsisType, torch.dtype, torch.device, Tensor})
"""Classes whose values hold no others."""


def leaves(value: Any) -> list[Any]:
    """Return the values that nested containers hold, in order.

    As ``pytree.tree_leaves``, and several times as fast for tuples, lists and dicts, which a step walks for every
    operation of a pass.
    """
    found: list[Any] = []
    _collect(value, found)
    return found


def mapped(kind: type, change: Callable[[Any], Any], value: Any) -> Any:
    """Return nested containers with ``change`` of every value of this class in its place; as ``tree_map_only``."""
    if isinstance(value, kind):
        return change(value)
    own = type(value)
    if own in _PLAIN:
        return value
    if own is tuple or own is list:
        parts = [mapped(kind, change, part) for part in value]
        return tuple(parts) if own is tuple else parts
    if own is dict:
        return {key: mapped(kind, change, part) for key, part in value.items()}
    return pytree.tree_map_only(kind, change, value)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors that nested containers hold, in order."""
    if isinstance(value, Tensor):
        return [value]
    return [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]


def _collect(value: Any, found: list[Any]) -> None:
    own = type(value)
    if own is tuple or own is list:
        parts = value
    elif own is dict:
        parts = value.values()
    else:
        found += [value] if own in _PLAIN else pytree.tree_leaves(value)
        return
    for part in parts:
        if type(part) in _PLAIN:
            found.append(part)
        else:
            _collect(part, found)
