"""Restore everything that a forward pass assigned in a model: attributes, buffers, hooks, flags and containers."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from splitfg.splitting._replace import hidden_modules

_MAPPINGS = (dict, OrderedDict, defaultdict)
_COLLECTIONS = (list, set, deque)
_CONTAINERS = (*_MAPPINGS, *_COLLECTIONS)

# Tensors that a forward pass has written to in place: later passes store their values too.
_written = WeakTensorKeyDictionary()


@contextmanager
def restored(*parts: nn.Module) -> Iterator[None]:
    """Restore the attributes of modules after one forward pass, also if it raises.

    Covers containers in attributes, such as lists and caches. Restores values only of tensors that an earlier pass
    under :func:`preserved` wrote to in place.
    """
    if torch.compiler.is_compiling():  # compiled code has side effects only on copies of the attributes
        yield
        return
    snapshot = _Snapshot(parts, lambda t: t in _written)
    try:
        yield
    finally:
        snapshot.restore()


@contextmanager
def preserved(*parts: nn.Module) -> Iterator[None]:
    """Restore modules as :func:`restored` does, and the values of all their buffers and torch's global generators."""
    snapshot = _Snapshot(parts, lambda _: True)
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        snapshot.restore()
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)


def copies_of_written(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of the buffers that forward passes write to in place, for a pass to write to instead.

    :mod:`torch.func` raises if a pass writes in place to a tensor from outside the transformed function.
    """
    if torch.compiler.is_compiling() or not _written:
        return {}
    return {name: buffer.clone() for name, buffer in module.named_buffers() if buffer in _written}


class _Snapshot:
    """The attributes of modules, and the values of some of their tensors.

    Args:
        parts: Modules; their submodules are included.
        stored: Whether to store the value of a tensor that is not a parameter.
    """

    def __init__(self, parts: Iterable[nn.Module], stored: Callable[[Tensor], bool]) -> None:
        self._contents: dict[int, tuple[Any, Any]] = {}
        self._tensors: dict[int, tuple[Tensor, int, Tensor | None]] = {}
        for module in dict.fromkeys(module for part in parts for module in hidden_modules(part)):
            self._add(vars(module), stored)

    def restore(self) -> None:
        """Undo every change since the snapshot."""
        for container, content in self._contents.values():
            _refill(container, content)
        for tensor, version, value in self._tensors.values():
            if _version(tensor) != version:
                _written[tensor] = True
            if value is not None and (_version(tensor) != version or version < 0):
                with torch._C._DisableFuncTorch():
                    tensor.data.copy_(value)  # through .data, so that autograd's saved tensors stay valid

    def _add(self, value: Any, stored: Callable[[Tensor], bool]) -> None:
        if type(value) in _CONTAINERS:
            if id(value) not in self._contents:
                content = value.copy()
                self._contents[id(value)] = value, content
                for inner in content.values() if isinstance(content, dict) else content:
                    self._add(inner, stored)
        elif isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            self._tensors[id(value)] = value, _version(value), _copied(value) if stored(value) else None


def _refill(container: Any, content: Any) -> None:
    if isinstance(container, dict):
        same = len(container) == len(content) and all(container.get(k, content) is v for k, v in content.items())
    else:
        same = len(container) == len(content) and all(a is b for a, b in zip(container, content, strict=True))
    if not same:
        container.clear()
        (container.extend if isinstance(container, list | deque) else container.update)(content)


def _version(tensor: Tensor) -> int:
    """Return the number of in-place writes so far; -1 if torch does not count them."""
    try:
        return tensor._version
    except RuntimeError:  # a tensor from inference mode
        return -1


def _copied(tensor: Tensor) -> Tensor | None:
    try:
        with torch._C._DisableFuncTorch():
            return tensor.detach().clone()
    except RuntimeError:  # a tensor without values, such as one on the meta device or of a lazy module
        return None
