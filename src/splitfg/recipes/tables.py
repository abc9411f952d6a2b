"""Recipes of learners for tables: networks, heads, and a method with an optimizer.

This module does not import torch before ``build()``.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

from splitfg.errors import raise_if
from splitfg.recipes._methods import TableMethod
from splitfg.recipes._optimizers import Adam
from splitfg.recipes._registry import Recipe, recipes
from splitfg.recipes.checks import adaptive_problems, below

if TYPE_CHECKING:
    import torch
    from torch import nn

    from splitfg.heads import Head, OutputLoss
    from splitfg.models import MLP
    from splitfg.types import Learner

__all__ = [
    "HeadRecipe",
    "LinearHeadRecipe",
    "Network",
    "NetworkRecipe",
    "NonlinearHeadRecipe",
    "PlainNetwork",
    "ProbedHeadRecipe",
    "TableRecipe",
    "TableShape",
    "table_methods",
]


def table_methods() -> dict[str, TableMethod]:
    """Return every method with a short name, with its settings for tables: the paper's K = 8.

    Two tangents per pass, since such a chunk fits a CPU's cache.

    Example:
        >>> from splitfg.recipes.tables import table_methods
        >>> table_methods()["split_fg"].K
        8
    """
    named = {cls.name: cls for cls in recipes(TableMethod).values() if cls.name}
    return {name: cls(**cls.for_tables) for name, cls in named.items()}


class HeadRecipe(Recipe):
    """Settings of the head above a table's trunk; :meth:`build` makes it."""

    @abstractmethod
    def build(self, width: int, shape: TableShape, generator: torch.Generator) -> Head:
        """Return the head.

        Args:
            width: Features of h.
            shape: Decides the outputs and the loss.
            generator: Draws the initial parameters.
        """


@dataclass(frozen=True)
class LinearHeadRecipe(HeadRecipe):
    """One linear layer, in closed form."""

    def build(self, width: int, shape: TableShape, generator: torch.Generator) -> Head:
        """Return :class:`~splitfg.LinearHead`."""
        from splitfg.heads import LinearHead
        from splitfg.models import linear

        return LinearHead(linear(width, shape.outputs, generator=generator), loss=shape.loss())


@dataclass(frozen=True)
class NonlinearHeadRecipe(HeadRecipe):
    """A hidden ReLU layer and a linear layer, differentiated by reverse mode confined to the head.

    Attributes:
        width: Width of the hidden layer.
    """

    width: int = 64

    def __post_init__(self) -> None:
        raise_if(below(1, self, "width"))

    def build(self, width: int, shape: TableShape, generator: torch.Generator) -> Head:
        """Return :class:`~splitfg.ReverseModeHead`."""
        from torch import nn

        from splitfg.heads import ReverseModeHead
        from splitfg.models import linear

        hidden = linear(width, self.width, generator=generator)
        last = linear(self.width, shape.outputs, generator=generator)
        return ReverseModeHead(nn.Sequential(hidden, nn.ReLU(), last), shape.loss())


@dataclass(frozen=True)
class ProbedHeadRecipe(HeadRecipe):
    """One linear layer as a black box, measured by central differences."""

    def build(self, width: int, shape: TableShape, generator: torch.Generator) -> Head:
        """Return :class:`~splitfg.ProbedHead`."""
        from splitfg.heads import ProbedHead
        from splitfg.models import linear

        return ProbedHead(linear(width, shape.outputs, generator=generator), shape.loss())


@dataclass(frozen=True)
class TableShape:
    """Shape of a table: its number of features, and of classes (``None`` for one real value)."""

    features: int
    classes: int | None

    @property
    def outputs(self) -> int:
        """Number of outputs of a head: one per class, or one value."""
        return 1 if self.classes is None else self.classes

    def loss(self) -> OutputLoss:
        """Return the loss of the task."""
        from splitfg.heads import CrossEntropy, SquaredError

        return SquaredError() if self.classes is None else CrossEntropy()


class NetworkRecipe(Recipe):
    """Settings of a trunk for tables and of the head above it."""

    @abstractmethod
    def trunk(self, features: int, generator: torch.Generator) -> nn.Module:
        """Return the trunk."""

    @abstractmethod
    def plain_trunk(self, features: int, generator: torch.Generator) -> MLP:
        """Return a plain MLP of the same depth and width, for methods that need one."""

    @abstractmethod
    def build_head(self, shape: TableShape, generator: torch.Generator) -> Head:
        """Return the head above either trunk, with the loss of the task."""


@dataclass(frozen=True)
class _LayeredNetwork(NetworkRecipe):
    """Settings that networks of hidden layers share."""

    width: int = 128
    layers: int = 2
    head: HeadRecipe = field(default_factory=LinearHeadRecipe, kw_only=True)

    def __post_init__(self) -> None:
        raise_if(below(1, self, "width", "layers"))

    @final
    def build_head(self, shape: TableShape, generator: torch.Generator) -> Head:
        """Build the head that ``head`` describes."""
        return self.head.build(self.width, shape, generator)

    @final
    def plain_trunk(self, features: int, generator: torch.Generator) -> MLP:
        """Return :class:`~splitfg.models.MLP`."""
        from splitfg.models import MLP

        return MLP(features, widths=(self.width,) * self.layers, generator=generator)


@dataclass(frozen=True)
class Network(_LayeredNetwork):
    """The paper's TabM-style trunk and the head above it.

    Attributes:
        width: Hidden width d_h.
        layers: Hidden layers.
        members: Ensemble members k_ens.
        head: Maps h to the outputs.
    """

    members: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        raise_if(below(1, self, "members"))

    def trunk(self, features: int, generator: torch.Generator) -> nn.Module:
        """Return :class:`~splitfg.models.TabM`."""
        from splitfg.models import TabM

        return TabM(features, width=self.width, layers=self.layers, members=self.members, generator=generator)


@dataclass(frozen=True)
class PlainNetwork(_LayeredNetwork):
    """A plain ReLU MLP and the head above it.

    Attributes:
        width: Hidden width.
        layers: Hidden layers.
        head: Maps h to the outputs.
    """

    def trunk(self, features: int, generator: torch.Generator) -> nn.Module:
        """Return :class:`~splitfg.models.MLP`."""
        return self.plain_trunk(features, generator)


@dataclass(frozen=True)
class TableRecipe:
    """Settings of a learner for tables.

    Attributes:
        method: The method.
        network: Trunk and head.
        optimizer: The optimizer.
        rho: Trunk step scale.
        clip: Joint clipping bound.
        adaptive: Let a line search find the trunk step scale, for gradient methods; rho must be 1.

    Example:
        >>> import torch
        >>> from splitfg.recipes import ActivityMethod, Adam
        >>> from splitfg.recipes.tables import PlainNetwork, TableRecipe, TableShape
        >>> recipe = TableRecipe(ActivityMethod(), PlainNetwork(width=16), Adam())
        >>> learner = recipe.build(TableShape(features=10, classes=3), torch.Generator())
    """

    method: TableMethod
    network: NetworkRecipe
    optimizer: Adam
    rho: float = 1.0
    clip: float = 1.0
    adaptive: bool = False

    def __post_init__(self) -> None:
        raise_if(adaptive_problems(self.adaptive, self.rho))

    def build(self, shape: TableShape, generator: torch.Generator) -> Learner:
        """Build the learner, on the generator's device.

        Raises:
            SplitError: If the method cannot learn this table.
        """
        return self.method.table_learner(self, shape, generator)
