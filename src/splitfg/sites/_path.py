"""The residual stream of a trunk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import nn

from splitfg.errors import raise_if
from splitfg.sites._features import FeatureDimension
from splitfg.sites._layers import LAYER_HOOK, has_layer_gradients
from splitfg.sites._pullback import TOP_HOOK, has_pull_back
from splitfg.splitting import Split
from splitfg.types import Inputs


@dataclass(frozen=True)
class ResidualPath(FeatureDimension):
    """The residual stream of a trunk: its writers, and the module between its top and h.

    x_0 = w_0,  x_{i+1} = x_i + w_{i+1},  h = top(x_L).

    Names are those of the trunk's modules and parameters.

    Attributes:
        writers: Modules whose outputs w_i are added to the stream as they are (``nn.Linear``, ``nn.Embedding``,
            ``nn.Conv2d``, or a ``LocalLayer`` of yours), in the order in which they write.
        top: The module that reads the top of the stream and gives h, flattened or not: a norm, or ``nn.ReLU``;
            ``None`` where the top is h.
        added: Parameters that are added to the stream themselves, each with the writer it is added beside. One with
            more rows than the stream is read from its first.
        features: The dimension of the stream that holds features, which maps mix; ``None`` for the channels of images
            (dimension 1 of 4) and the last of anything else.
        strict: Raise :class:`SplitError` if the writes do not sum to the top. Set it to ``False`` to train along a
            stream that is scaled or rectified between blocks.

    Example:
        >>> from torch import nn
        >>> from splitfg import ResidualPath
        >>> class Residual(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.first, self.block, self.norm = nn.Linear(4, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        ...     def forward(self, x):
        ...         x = self.first(x)
        ...         return self.norm(x + self.block(x.relu()))
        >>> path = ResidualPath(writers=("first", "block"), top="norm")
        >>> path.problems(Residual())
        []
    """

    writers: tuple[str, ...]
    top: str | None = None
    added: Mapping[str, str] = field(default_factory=dict)
    features: int | None = None
    strict: bool = True

    def __post_init__(self) -> None:
        given: object = self.writers
        raise_if([f"writers is {given!r}: give a tuple of names, ({given!r},)"] if isinstance(given, str) else [])
        object.__setattr__(self, "writers", tuple(self.writers))

    @classmethod
    def find(cls, network: Split | nn.Module, batch: Inputs, *, strict: bool = True) -> ResidualPath:
        """Find the stream of a trunk from one forward pass: the values that are added up to the top, in order.

        Starts at h, takes the norm that gives it as the top, and follows every sum to its terms, down to layers and
        parameters. Print the result to see what was found; the first batch of :class:`~splitfg.DirectPath` validates
        that the writers sum to the top.

        Args:
            network: A split, or a model with its head that :func:`~splitfg.split` cuts.
            batch: Inputs; labels in a dict are ignored.
            strict: Whether the stream must be a plain sum. ``False`` also follows it through norms and scales, as in
                models that normalise after every block, and the path is then an approximation.

        Raises:
            SplitError: If the stream contains values that no layer writes, with what was found; or a model does not
                end in the linear layer that it is cut at, such as a trunk without its head.

        Example:
            >>> import torch
            >>> from torch import nn
            >>> from splitfg import ResidualPath
            >>> class Residual(nn.Module):
            ...     def __init__(self):
            ...         super().__init__()
            ...         self.first, self.block, self.norm = nn.Linear(4, 8), nn.Linear(8, 8), nn.LayerNorm(8)
            ...         self.head = nn.Linear(8, 3)
            ...     def forward(self, x):
            ...         x = self.first(x)
            ...         return self.head(self.norm(x + self.block(x.relu())))
            >>> path = ResidualPath.find(Residual(), torch.randn(16, 4))
            >>> path.writers, path.top
            (('first', 'block'), 'norm')
        """
        from splitfg.sites._find_path import find_path

        return find_path(network, batch, strict=strict)

    def problems(self, trunk: nn.Module) -> list[str]:
        """List everything that does not fit a trunk."""
        modules, params = dict(trunk.named_modules()), dict(trunk.named_parameters())
        wanted = [*self.writers, *([] if self.top is None else [self.top])]
        found = [f"the path names {name!r}, which is no module of the trunk" for name in wanted if name not in modules]
        found += [f"the path names {p!r}, which is no parameter of the trunk" for p in self.added if p not in params]
        twice = [name for name, count in Counter(wanted).items() if count > 1]
        found += [f"the path names {name!r} twice: a writer once, and the top not among them" for name in twice]
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
                    " nn.Conv2d (and no subclass) whose output is added to the stream, or give the class a method"
                    f"{LAYER_HOOK}"
                )
        if self.top in modules and not has_pull_back(modules[self.top]):
            found.append(
                f"there is no closed form for {self.top} ({type(modules[self.top]).__name__}): end the trunk"
                f" with nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.ReLU or nn.Identity, or give it a method{TOP_HOOK}"
            )
        return found if self.writers else ["the path has no writer", *found]


@runtime_checkable
class ResidualTrunk(Protocol):
    """A trunk that declares its own residual stream."""

    def residual_path(self) -> ResidualPath:
        """Return the residual stream."""
