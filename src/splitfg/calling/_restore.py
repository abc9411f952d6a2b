"""Restore everything that a forward pass assigned in a model: attributes, buffers, hooks, flags and containers."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from operator import is_
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn

from splitfg.calling._effects import Observed, modules_of
from splitfg.calling._generators import same_generators
from splitfg.errors import raise_if

_MAPPINGS = (dict, OrderedDict, defaultdict)
_COLLECTIONS = (list, set, deque)
_CONTAINERS = (*_MAPPINGS, *_COLLECTIONS)


@contextmanager
def restored(*parts: nn.Module, observed: Observed | None = None, strict: bool = False) -> Iterator[None]:
    """Restore the attributes of modules after one forward pass, also if it raises.

    Covers containers and dataclasses in attributes, such as lists and caches, and the values of buffers that earlier
    passes were observed to write to in place. The attributes that a module's class names in ``outside``, such as a
    device, keep their own state.

    Args:
        parts: The modules.
        observed: Observations of earlier passes.
        strict: Whether a write in place to another buffer, which cannot be undone, raises an error.

    Raises:
        SplitError: There is such a write.
    """
    if torch.compiler.is_compiling():  # compiled code has side effects only on copies of the attributes
        yield
        return
    snapshot = _Snapshot(parts, set() if observed is None else observed.tensors())
    try:
        yield
    finally:
        snapshot.restore()
    if strict:
        raise_if(_write_problems(parts, snapshot.missed()))


@contextmanager
def preserved(*parts: nn.Module) -> Iterator[None]:
    """Restore modules as :func:`restored` does, and the values of all their buffers and the global generators."""
    snapshot = _Snapshot(parts, None)
    with same_generators():
        try:
            yield
        finally:
            snapshot.restore()


@dataclass(frozen=True, eq=False)
class ForwardState:
    """The change that one forward pass made to the attributes and buffers of a model, undone and ready to be applied.

    Attributes:
        contents: Containers (such as the attributes of a module) with their new content.
        values: Tensors with their new values.
    """

    contents: list[tuple[Any, Any]]
    values: list[tuple[Tensor, Tensor]]

    def __bool__(self) -> bool:
        return bool(self.contents or self.values)

    def apply(self) -> None:
        """Apply the change. Tensors of an unchanged shape and dtype change in place."""
        for container, content in self.contents:
            _refill(container, _kept_in_place(container, content))
        for tensor, value in self.values:
            _write(tensor, value)


def forward_state(parts: Sequence[nn.Module], observed: Observed | None, run: Callable[[], object]) -> ForwardState:
    """Run a forward pass and return what it changes in modules; restores the modules.

    Args:
        parts: The modules.
        observed: Observations of earlier passes; ``None`` if it may write to any buffer in place.
        run: Runs the pass.
    """
    snapshot = _Snapshot(parts, None if observed is None else observed.tensors())
    try:
        run()
        return snapshot.changes()
    finally:
        snapshot.restore()


class _Snapshot:
    """The attributes of modules, and the values of some of their tensors.

    Args:
        parts: Modules; their submodules are included.
        stored: ``id`` of the tensors whose values to store; ``None`` for all that are not parameters.
    """

    def __init__(self, parts: Iterable[nn.Module], stored: set[int] | None) -> None:
        self._contents: dict[int, tuple[Any, Any]] = {}
        self._empty: list[Any] = []  # most containers of a module are for hooks, and empty
        self._tensors: dict[int, tuple[Tensor, int, Tensor | None]] = {}
        self._stored = stored
        modules = list(modules_of(parts))
        self._outside = {id(vars(m).get(name)) for m in modules for name in _outside(m)}
        self._add(map(vars, modules))

    def restore(self) -> None:
        """Undo every change since the snapshot."""
        for container in self._empty:
            if container:
                container.clear()
        for container, content in self._contents.values():
            _refill(container, content)
        for tensor, _, value in self._tensors.values():
            if value is not None:
                _write(tensor, value)

    def written(self) -> list[Tensor]:
        """Return the tensors that were written to in place; all stored ones if only some were stored."""
        if self._stored is not None:  # without waiting for a GPU
            return [tensor for tensor, _, value in self._tensors.values() if value is not None]
        return [
            tensor
            for tensor, version, value in self._tensors.values()
            # batch norm writes to its statistics without a new version
            if version_of(tensor) != version or (value is not None and not _equal(tensor, value))
        ]

    def missed(self) -> set[int]:
        """Return ``id`` of the tensors that were written to in place and not stored."""
        held = self._tensors.items()
        return {key for key, (t, version, value) in held if value is None and version_of(t) != version}

    def changes(self) -> ForwardState:
        """Return every change since the snapshot."""
        contents = [(kept, kept.copy()) for kept in self._empty if kept]
        contents += [(kept, kept.copy()) for kept, content in self._contents.values() if not _same(kept, content)]
        return ForwardState(contents, [(t, t.detach().clone()) for t in self.written()])

    def _add(self, values: Iterable[Any]) -> None:
        for value in values:
            kind: type = type(value)
            role = _ROLES.get(kind) or _role(kind)
            if role is _Role.OTHER or id(value) in self._outside:
                continue
            if role is _Role.CONTAINER:
                if not value:
                    self._empty.append(value)
                elif id(value) not in self._contents:
                    content = value.copy()
                    self._contents[id(value)] = value, content
                    self._add(content.values() if isinstance(content, dict) else content)
            elif role is _Role.DATACLASS:
                self._add([vars(value)] if hasattr(value, "__dict__") else [])
            elif not isinstance(value, nn.Parameter):
                stored = self._stored is None or id(value) in self._stored
                self._tensors[id(value)] = value, version_of(value), _copied(value) if stored else None


def _write_problems(parts: Iterable[nn.Module], missed: set[int]) -> list[str]:
    if not missed:
        return []
    return [
        f"the forward pass writes in place to the buffer {name}, which the first pass did not: assign a new tensor, as"
        " in self.mean = self.mean.lerp(new, 0.1), so that estimates can run several passes"
        for part in parts
        for name, buffer in part.named_buffers()
        if id(buffer) in missed
    ]


class _Role(Enum):
    """The stored state of a value."""

    CONTAINER = auto()
    TENSOR = auto()
    DATACLASS = auto()
    OTHER = auto()


def _role(kind: type) -> _Role:
    if kind in _CONTAINERS:
        return _Role.CONTAINER
    if issubclass(kind, Tensor):
        return _Role.TENSOR
    return _Role.DATACLASS if hasattr(kind, "__dataclass_fields__") else _Role.OTHER


_FREQUENT = (bool, int, float, str, tuple, NoneType, dict, OrderedDict, Tensor, nn.Parameter)
# a compiler traces a snapshot, and warns about functools.lru_cache
_ROLES = {kind: _role(kind) for kind in _FREQUENT}


def _outside(module: nn.Module) -> tuple[str, ...]:
    """Return the attributes that a module's class names in ``outside``, which may mean something else to a user."""
    names = getattr(type(module), "outside", ())
    return names if isinstance(names, tuple) else ()


def _equal(a: Tensor, b: Tensor) -> bool:
    if a.layout != torch.strided:
        a, b = a.to_dense(), b.to_dense()
    return bool(((a == b) | ((a != a) & (b != b))).all())


def _same(container: Any, content: Any) -> bool:
    """Whether a container holds the very objects of ``content``."""
    if len(container) != len(content):
        return False
    if isinstance(container, set):  # two equal sets may differ in the order of their elements
        return set(map(id, container)) == set(map(id, content))
    if isinstance(container, dict):
        return all(map(is_, container.values(), content.values())) and list(container) == list(content)
    return all(map(is_, container, content))


def _refill(container: Any, content: Any) -> None:
    if not _same(container, content):
        container.clear()
        (container.extend if isinstance(container, list | deque) else container.update)(content)


def _kept_in_place(container: Any, content: Any) -> Any:
    """Write new tensors of a dictionary into the old ones where they fit, for captured steps."""
    if not isinstance(container, dict):
        return content
    kept = content.copy()
    for key, new in content.items():
        old = container.get(key)
        if old is not None and old is not new and _fits(old, new):
            _write(old, new)
            kept[key] = old
    return kept


def _fits(old: Any, new: Any) -> bool:
    if not (isinstance(old, Tensor) and isinstance(new, Tensor)) or isinstance(old, nn.Parameter):
        return False
    return (old.shape, old.dtype, old.device, old.requires_grad) == (new.shape, new.dtype, new.device, False)


def _write(tensor: Tensor, value: Tensor) -> None:
    with torch._C._DisableFuncTorch():
        tensor.data.copy_(value)  # through .data, so that autograd's saved tensors stay valid


def version_of(tensor: Tensor) -> int:
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
