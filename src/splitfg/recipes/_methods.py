"""Recipes of gradient methods and tangent laws."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, final

from splitfg.errors import raise_if
from splitfg.recipes._registry import Recipe
from splitfg.recipes.checks import below, not_fractions, not_positive

if TYPE_CHECKING:
    import torch

    from splitfg.estimators import Estimator
    from splitfg.recipes.tables import TableRecipe, TableShape
    from splitfg.tangents import TangentLaw
    from splitfg.types import Learner


class LawRecipe(Recipe):
    """Settings of a tangent law; :meth:`build` makes it."""

    @abstractmethod
    def build(self) -> TangentLaw:
        """Return the law."""


@dataclass(frozen=True)
class GaussianLaw(LawRecipe):
    """v ~ N(0, I)."""

    def build(self) -> TangentLaw:
        """Return :class:`~splitfg.Gaussian`."""
        from splitfg.tangents import Gaussian

        return Gaussian()


@dataclass(frozen=True)
class RademacherLaw(LawRecipe):
    """v_i = ±1."""

    def build(self) -> TangentLaw:
        """Return :class:`~splitfg.Rademacher`."""
        from splitfg.tangents import Rademacher

        return Rademacher()


@dataclass(frozen=True)
class OrthogonalLaw(LawRecipe):
    """K mutually orthogonal tangents."""

    def build(self) -> TangentLaw:
        """Return :class:`~splitfg.Orthogonal`."""
        from splitfg.tangents import Orthogonal

        return Orthogonal()


@dataclass(frozen=True)
class ConditionedLaw(LawRecipe):
    """Coordinates scaled by a running gradient magnitude to a power.

    Attributes:
        beta: Decay rate of the running magnitude.
        power: Exponent of the magnitude.
        floor: Smallest scale, relative to the root mean square.
    """

    beta: float = 0.99
    power: float = 1.0
    floor: float = 0.1

    def __post_init__(self) -> None:
        raise_if(not_fractions(self, "beta"))

    def build(self) -> TangentLaw:
        """Return :class:`~splitfg.Conditioned`, on a magnitude that the learner updates."""
        from splitfg.tangents import Conditioned, RunningMagnitude

        return Conditioned(RunningMagnitude(self.beta), self.power, self.floor)


class TableMethod(Recipe):
    """Settings of any method that learns tables.

    Attributes:
        name: Short name, accepted by ``SplitFGClassifier(method=...)``; empty for methods without one.
        for_tables: Settings that replace the defaults when a table chooses the method by name.
    """

    name: ClassVar[str] = ""
    for_tables: ClassVar[Mapping[str, Any]] = {}

    @abstractmethod
    def table_learner(self, recipe: TableRecipe, shape: TableShape, generator: torch.Generator) -> Learner:
        """Build the learner of a table.

        Args:
            recipe: Network, optimizer, rho and clipping.
            shape: Features and classes of the table.
            generator: Draws the initial parameters; its device is the learner's.

        Raises:
            SplitError: If the method cannot learn this table.
        """


class MethodRecipe(TableMethod):
    """Settings of a gradient method; :meth:`build` makes its estimator.

    Attributes:
        plain_trunk: Whether the method needs a plain MLP for tables, rather than the network of the recipe.
    """

    plain_trunk: ClassVar[bool] = False

    @abstractmethod
    def build(self) -> Estimator:
        """Return the estimator."""

    @final
    def table_learner(self, recipe: TableRecipe, shape: TableShape, generator: torch.Generator) -> Learner:
        """Build a gradient learner on the network of the recipe."""
        from splitfg.learners import GradientLearner, LineSearch
        from splitfg.splitting import Split

        network = recipe.network
        trunk = (network.plain_trunk if self.plain_trunk else network.trunk)(shape.features, generator)
        split = Split(trunk, network.build_head(shape, generator))
        optimizer = recipe.optimizer.build(split, rho=recipe.rho)
        search = LineSearch() if recipe.adaptive else None
        return GradientLearner(split, self.build(), optimizer, max_norm=recipe.clip, line_search=search)


@dataclass(frozen=True)
class FrozenMethod(MethodRecipe):
    """An untrained trunk with an exactly trained head."""

    name: ClassVar[str] = "frozen"

    def build(self) -> Estimator:
        """Return :class:`~splitfg.FrozenTrunk`."""
        from splitfg.estimators import FrozenTrunk

        return FrozenTrunk()


@dataclass(frozen=True)
class BackpropMethod(MethodRecipe):
    """Reverse mode through trunk and head.

    Attributes:
        closed_head: Use the head's closed form, in row chunks, and reverse mode through the trunk alone.
        readout_only: Leave out the trunk's share of tied parameters, as ``Tied.EXCLUDE`` does.
    """

    name: ClassVar[str] = "backprop"

    closed_head: bool = False
    readout_only: bool = False

    def build(self) -> Estimator:
        """Return :class:`~splitfg.Backprop`."""
        from splitfg.estimators import Backprop

        return Backprop(self.closed_head, self.readout_only)


@dataclass(frozen=True)
class SplitFGMethod(MethodRecipe):
    """Exact head, and K tangents on the trunk's weights, ``chunk`` of them per pass; unbiased.

    ``lean`` computes the head's gradients after the tangents, at the cost of computing its outputs twice; the estimate
    is the same.

    Attributes:
        K: Number of tangents per step.
        chunk: Tangents per forward pass; none for all at once, 1 for the least memory.
        law: Distribution of the tangents.
        lean: Compute the head's gradients after the tangents, for less memory; the estimate is the same.

    Example:
        >>> from splitfg.recipes import RademacherLaw, SplitFGMethod
        >>> SplitFGMethod(K=8, chunk=2, law=RademacherLaw()).build()
        SplitFG(...)
    """

    name: ClassVar[str] = "split_fg"
    for_tables: ClassVar[Mapping[str, Any]] = {"K": 8, "chunk": 2}

    K: int = 4
    chunk: int | None = None
    law: LawRecipe = field(default_factory=GaussianLaw)
    lean: bool = False

    def __post_init__(self) -> None:
        raise_if(below(1, self, "K", "chunk"))

    def build(self) -> Estimator:
        """Return :class:`~splitfg.SplitFG`."""
        from splitfg.engines import ForwardMode
        from splitfg.estimators import SplitFG

        return SplitFG(self.K, self.law.build(), ForwardMode(self.chunk), lean=self.lean)


@dataclass(frozen=True)
class ActivityMethod(MethodRecipe):
    """Exact head, and K tangents on the outputs of the trunk's layers with a score per row, ``chunk`` per pass.

    Attributes:
        K: Number of tangents per step.
        chunk: Tangents per forward pass; none for all at once, 1 for the least memory.
    """

    name: ClassVar[str] = "activity_fg"
    for_tables: ClassVar[Mapping[str, Any]] = {"chunk": 2}

    K: int = 8
    chunk: int | None = None

    def __post_init__(self) -> None:
        raise_if(below(1, self, "K", "chunk"))

    def build(self) -> Estimator:
        """Return :class:`~splitfg.ActivityFG`, on the trunk's own ``activities()``."""
        from splitfg.engines import ForwardMode
        from splitfg.estimators import ActivityFG

        return ActivityFG(self.K, engine=ForwardMode(self.chunk))


@dataclass(frozen=True)
class PureFGMethod(MethodRecipe):
    """The pure forward gradient: K tangents over trunk and head together.

    Attributes:
        K: Number of tangents per step.
        chunk: Tangents per forward pass; none for all at once, 1 for the least memory.
    """

    name: ClassVar[str] = "pure_fg"
    for_tables: ClassVar[Mapping[str, Any]] = {"K": 8, "chunk": 2}

    K: int = 4
    chunk: int | None = None

    def __post_init__(self) -> None:
        raise_if(below(1, self, "K", "chunk"))

    def build(self) -> Estimator:
        """Return :class:`~splitfg.ForwardGradient`."""
        from splitfg.engines import ForwardMode
        from splitfg.estimators import ForwardGradient

        return ForwardGradient(self.K, engine=ForwardMode(self.chunk))


@dataclass(frozen=True)
class EvolutionMethod(MethodRecipe):
    """K antithetic pairs of evaluations at distance sigma.

    Attributes:
        K: Number of antithetic pairs per step.
        sigma: Distance of the two evaluations of a pair from the current parameters.
    """

    name: ClassVar[str] = "es"
    for_tables: ClassVar[Mapping[str, Any]] = {"K": 8}

    K: int = 4
    sigma: float = 1e-3

    def __post_init__(self) -> None:
        raise_if(below(1, self, "K") + not_positive(self, "sigma"))

    def build(self) -> Estimator:
        """Return :class:`~splitfg.EvolutionStrategy`."""
        from splitfg.estimators import EvolutionStrategy

        return EvolutionStrategy(self.K, self.sigma)
