"""The layers that activity tangents perturb."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import nn

from splitfg.errors import raise_if, shorten
from splitfg.sites._layers import LAYER_HOOK, LocalLayer, has_layer_gradients
from splitfg.sites._pullback import TOP_HOOK, has_pull_back


@dataclass(frozen=True)
class Activities:
    """The layers of a trunk that :class:`~splitfg.ActivityFG` perturbs, and the module up to which rows do not mix.

    Names are those of the trunk's modules.

    Attributes:
        layers: Layers, each called once a pass, that can compute the gradient of their parameters from their input and
            the gradient at their output (``nn.Linear``, ``nn.Conv2d``, ``nn.Embedding``, norms, or a ``LocalLayer``);
            ``None`` for all of these.
        top: The module up to which rows do not mix. Scores are taken at its input; ``None`` to take them at h.
        rows: Leading dimensions, of the top and of every layer's output, that number such rows: 1 for samples, 2 for
            the members of an ensemble on each sample.

    Example:
        >>> from torch import nn
        >>> from splitfg import Activities
        >>> trunk = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8))
        >>> Activities().names(trunk)
        ('0', '2')
    """

    layers: tuple[str, ...] | None = None
    top: str | None = None
    rows: int = 1

    def __post_init__(self) -> None:
        raise_if([] if self.rows >= 1 else [f"rows must be at least 1 leading dimension, got {self.rows}"])

    def names(self, trunk: nn.Module) -> tuple[str, ...]:
        """Return the names of layers with trained parameters; leaves out the top, which is exact."""
        modules = dict(trunk.named_modules())
        wanted = _outermost(modules) if self.layers is None else self.layers
        trained = (n for n in wanted if any(p.requires_grad for p in modules[n].parameters()))
        return tuple(n for n in trained if n != self.top)

    def problems(self, trunk: nn.Module) -> list[str]:
        """List everything that does not fit a trunk."""
        modules = dict(trunk.named_modules())
        wanted = [*(self.layers or ()), *([] if self.top is None else [self.top])]
        found = [f"the trunk has no module named {name!r}" for name in wanted if name not in modules]
        for name in self.layers or ():
            if name in modules and not has_layer_gradients(modules[name]):
                found.append(
                    f"{name} ({type(modules[name]).__name__}) does not know its own gradient: name nn.Linear,"
                    f" nn.Conv2d, nn.Embedding or norms, or give it a method{LAYER_HOOK}"
                )
        if self.top in modules and not has_pull_back(modules[self.top]):
            found.append(
                f"there is no closed form for {self.top} ({type(modules[self.top]).__name__}): give it a"
                f" method{TOP_HOOK}"
            )
        return found or self._left_out(trunk)

    def _left_out(self, trunk: nn.Module) -> list[str]:
        """List trained parameters outside all layers, unless the layers were chosen by name."""
        names = self.names(trunk)
        if not names:
            return ["no layer of the trunk is trained: set requires_grad, or use FrozenTrunk()"]
        if self.layers is not None:
            return []
        known = [trunk.get_submodule(name) for name in (*names, *([] if self.top is None else [self.top]))]
        covered = {id(p) for module in known for p in module.parameters(recurse=isinstance(module, LocalLayer))}
        left = [name for name, p in trunk.named_parameters() if p.requires_grad and id(p) not in covered]
        if not left:
            return []
        verb = "belongs" if len(left) == 1 else "belong"
        return [
            f"{shorten(left)} {verb} to no layer that knows its own gradient: freeze it, choose layers with"
            " Activities(layers=...), make it a layer's (positions: an nn.Embedding read at ids of shape (B, T)), or"
            f" give the module that holds it a method{LAYER_HOOK}"
        ]


def _outermost(modules: Mapping[str, nn.Module]) -> list[str]:
    """Layers that know their own gradient and are no part of another such layer."""
    known = [name for name, module in modules.items() if has_layer_gradients(module)]
    inside = {
        name for name in known for other in known if name != other and (not other or name.startswith(f"{other}."))
    }
    return [name for name in known if name not in inside]


@runtime_checkable
class ActivityTrunk(Protocol):
    """A trunk that declares its own activities."""

    def activities(self) -> Activities:
        """Return the trunk's layers and rows."""
