"""Effects of forward passes on a network: the buffers they write to, and whether they draw random numbers."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

Flags: TypeAlias = tuple[tuple[int, bool, tuple[float, ...]], ...]
"""Identity, training flag and rates of dropout of a network's modules."""


@dataclass(frozen=True)
class Traits:
    """Side effects of a forward pass of a network, in one training mode.

    Attributes:
        random: Whether it draws from torch's global generators, as dropout does.
        stateful: Whether it changes attributes or buffers, as batch norm does.
        foreign: Names of the global generators outside of torch whose states it changes, such as NumPy's.
    """

    random: bool = False
    stateful: bool = False
    foreign: tuple[str, ...] = ()


class Following(nn.Module, ABC):
    """A module that calls modules which it does not register."""

    @abstractmethod
    def followed(self) -> Iterable[nn.Module]:
        """Return them."""


class Observed:
    """Observed side effects of a network's forward passes: the buffers they write to in place, and their traits.

    A copy of a network starts without observations.

    Attributes:
        traits: Side effects of passes, by training mode and arguments.
        padded: Names of the tables that passes look up with a ``padding_idx``, outside of modules that hold one.
    """

    def __init__(self) -> None:
        self.traits: dict[Hashable, Traits] = {}
        self.padded: set[str] = set()
        self._places: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()

    def __reduce__(self) -> tuple[type[Observed], tuple[()]]:
        return Observed, ()

    def add(self, parts: Sequence[nn.Module], written: Sequence[Tensor]) -> list[str]:
        """Remember the places of tensors that a pass wrote to in place, and list those that are not buffers.

        Returns:
            The names of tensors in other attributes, with their modules.
        """
        ids, found, strangers = {id(t) for t in written}, set[int](), []
        names = {id(module): name for part in reversed(parts) for name, module in part.named_modules()}
        for module in modules_of(parts):
            own = {leaf: id(buffer) for leaf, buffer in module._buffers.items() if buffer is not None}
            kept = own if updates_statistics(module) else {leaf: key for leaf, key in own.items() if key in ids}
            if kept:
                self._places.setdefault(module, set()).update(kept)
                found.update(kept.values())
            for leaf, value in vars(module).items():
                if id(value) in ids - found:
                    strangers.append(f"{leaf!r} of {names.get(id(module)) or 'the trunk'} ({type(module).__name__})")
        return strangers

    def tensors(self) -> set[int]:
        """Return ``id`` of the buffers that passes write to in place."""
        return {id(module._buffers.get(leaf)) for module, leaves in self._places.items() for leaf in leaves}

    def names(self, module: nn.Module) -> tuple[str, ...]:
        """Return the names of a module's buffers that passes write to; not for compiled code."""
        if not self._places:
            return ()
        ids = self.tensors()
        return tuple(name for name, buffer in module.named_buffers() if id(buffer) in ids)


def updates_statistics(module: nn.Module) -> bool:
    """Whether a module is a norm that writes to all its buffers whenever a pass calls it, and later passes may.

    Torch counts no new version of the statistics, and a batch may leave the mean over all as it was.
    """
    return isinstance(module, _NormBase) and module.training and module.track_running_stats


def copies(module: nn.Module, names: Sequence[str]) -> dict[str, Tensor]:
    """Return copies of a module's buffers, for a pass to write to instead.

    :mod:`torch.func` raises if a pass writes in place to a tensor from outside the transformed function.
    """
    if not names:
        return {}
    held = dict(module.named_buffers())
    return {name: held[name].clone() for name in names}


def modules_of(parts: Iterable[nn.Module]) -> Iterable[nn.Module]:
    """Return all modules of parts, once each, with those that they call and do not register."""
    found = registered_modules(parts)
    for module in [m for m in found if isinstance(m, Following)]:
        found |= dict.fromkeys(module.followed())
    return found


def registered_modules(parts: Iterable[nn.Module]) -> dict[nn.Module, None]:
    """Return all registered modules of parts, once each; faster than ``modules()``, which also makes their names."""
    found: dict[nn.Module, None] = {}
    for part in parts:
        _add_registered(part, found)
    return found


def _add_registered(module: nn.Module, found: dict[nn.Module, None]) -> None:
    if module in found:
        return
    found[module] = None
    for child in module._modules.values():
        if child is not None:
            _add_registered(child, found)
