"""Where a trunk writes to its residual stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import nn

from splitfg.sites._layers import has_layer_gradients
from splitfg.sites._pullback import has_pull_back


@dataclass(frozen=True)
class ResidualPath:
    """The residual stream of a trunk: who adds to it, and what stands between its top and h.

    x_0 = w_0,  x_{i+1} = x_i + w_{i+1},  h = norm(x_L).

    Names are those of the trunk's modules and parameters.

    Attributes:
        writers: Modules whose outputs w_i are added to the stream as they are (``nn.Linear``, ``nn.Embedding``,
            ``nn.Conv2d``, or a ``LocalLayer`` of yours), in the order in which they write.
        norm: The module that maps the top of the stream to h, flattened or not: a norm, or ``nn.ReLU``; ``None`` where
            the top is h.
        added: Parameters that are added to the stream themselves, each with the writer it is added beside. One with
            more rows than the stream is read from its first.
    """

    writers: tuple[str, ...]
    norm: str | None = None
    added: Mapping[str, str] = field(default_factory=dict)

    def problems(self, trunk: nn.Module) -> list[str]:
        """What of it does not fit a trunk."""
        modules, params = dict(trunk.named_modules()), dict(trunk.named_parameters())
        wanted = [*self.writers, *([] if self.norm is None else [self.norm])]
        found = [f"the path names {name!r}, which is no module of the trunk" for name in wanted if name not in modules]
        found += [f"the path names {p!r}, which is no parameter of the trunk" for p in self.added if p not in params]
        found += [
            f"{parameter} is added beside {writer!r}, which is no writer of the path"
            for parameter, writer in self.added.items()
            if writer not in self.writers
        ]
        for name in self.writers:
            if name in modules and not has_layer_gradients(modules[name]):
                kind = type(modules[name]).__name__
                found.append(
                    f"{name} ({kind}) cannot be trained by what it writes: name an nn.Linear, nn.Embedding or"
                    " nn.Conv2d whose output is added to the stream"
                )
        if self.norm in modules and not has_pull_back(modules[self.norm]):
            found.append(
                f"there is no closed form for {self.norm} ({type(modules[self.norm]).__name__}): end the trunk"
                " with nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.ReLU or nn.Identity"
            )
        return found if self.writers else ["the path has no writer", *found]


@runtime_checkable
class ResidualTrunk(Protocol):
    """A trunk that knows its own residual stream."""

    def residual_path(self) -> ResidualPath:
        """Where it writes."""
