"""Learners for tables as recipes: any method, the TabM-style network, and what is built from both.

Nothing here imports torch until something is built.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from splitfg.errors import refuse
from splitfg.recipes._checks import below
from splitfg.recipes._local import ForwardForwardMethod, HopfieldMethod, PredictiveCodingMethod
from splitfg.recipes._methods import (
    ActivityMethod,
    BackpropMethod,
    EvolutionMethod,
    FrozenMethod,
    PureFGMethod,
    SplitFGMethod,
)
from splitfg.recipes._optimizers import Adam

if TYPE_CHECKING:
    import torch

    from splitfg.heads import Head
    from splitfg.learners.forward_forward import ForwardForward
    from splitfg.models import MLP, TabM
    from splitfg.types import Learner

__all__ = [
    "METHODS",
    "HeadRecipe",
    "LinearHeadRecipe",
    "Network",
    "NonlinearHeadRecipe",
    "ProbedHeadRecipe",
    "TableRecipe",
    "TableShape",
    "TabularMethod",
]

TabularMethod: TypeAlias = (
    BackpropMethod
    | PureFGMethod
    | EvolutionMethod
    | ForwardForwardMethod
    | PredictiveCodingMethod
    | HopfieldMethod
    | SplitFGMethod
    | ActivityMethod
    | FrozenMethod
)

METHODS: dict[str, TabularMethod] = {
    "split_fg": SplitFGMethod(K=8, chunk=2),
    "backprop": BackpropMethod(),
    "pure_fg": PureFGMethod(K=8, chunk=2),
    "es": EvolutionMethod(K=8),
    "forward_forward": ForwardForwardMethod(),
    "predictive_coding": PredictiveCodingMethod(),
    "hopfield": HopfieldMethod(),
    "activity_fg": ActivityMethod(K=8, chunk=2),
    "frozen": FrozenMethod(),
}
"""The methods by name, with the paper's K = 8; activity tangents are not the paper's. Two tangents ride together: on a
CPU a chunk then fits its cache."""


@dataclass(frozen=True)
class LinearHeadRecipe:
    """One linear layer, in closed form."""


@dataclass(frozen=True)
class NonlinearHeadRecipe:
    """A hidden ReLU layer of its own before the outputs, differentiated by reverse mode confined to the head."""

    width: int = 64

    def __post_init__(self) -> None:
        refuse(below(1, self, "width"))


@dataclass(frozen=True)
class ProbedHeadRecipe:
    """One linear layer as a black box: measured by central differences, never differentiated."""


HeadRecipe: TypeAlias = LinearHeadRecipe | NonlinearHeadRecipe | ProbedHeadRecipe


@dataclass(frozen=True)
class TableShape:
    """What is learned: how many features there are, and how many classes (``None`` for one real value)."""

    features: int
    classes: int | None

    @property
    def outputs(self) -> int:
        """Outputs of a head: one per class, or one value."""
        return 1 if self.classes is None else self.classes


@dataclass(frozen=True)
class Network:
    """The paper's TabM-style trunk and the head above it; the local-learning baselines use a plain MLP as wide.

    Attributes:
        width: Hidden width d_h.
        layers: Hidden layers.
        members: Ensemble members k_ens.
        head: What maps h to the outputs.
    """

    width: int = 128
    layers: int = 2
    members: int = 8
    head: HeadRecipe = field(default_factory=LinearHeadRecipe)

    def __post_init__(self) -> None:
        refuse(below(1, self, "width", "layers", "members"))

    def trunk(self, features: int, generator: torch.Generator) -> TabM:
        """The TabM-style trunk."""
        from splitfg.models import TabM

        return TabM(features, width=self.width, layers=self.layers, members=self.members, generator=generator)

    def plain_trunk(self, features: int, generator: torch.Generator) -> MLP:
        """The plain MLP of the local-learning baselines."""
        from splitfg.models import MLP

        return MLP(features, widths=(self.width,) * self.layers, generator=generator)

    def build_head(self, shape: TableShape, generator: torch.Generator) -> Head:
        """The head above either trunk, with the loss of the task."""
        from torch import nn

        from splitfg.heads import CrossEntropy, LinearHead, ProbedHead, ReverseModeHead, SquaredError
        from splitfg.models import linear

        loss = SquaredError() if shape.classes is None else CrossEntropy()
        if isinstance(self.head, NonlinearHeadRecipe):
            hidden = linear(self.width, self.head.width, generator=generator)
            last = linear(self.head.width, shape.outputs, generator=generator)
            return ReverseModeHead(nn.Sequential(hidden, nn.ReLU(), last), loss)
        layer = linear(self.width, shape.outputs, generator=generator)
        return LinearHead(layer, loss=loss) if isinstance(self.head, LinearHeadRecipe) else ProbedHead(layer, loss)


@dataclass(frozen=True)
class TableRecipe:
    """Everything a learner is built from, but for the data's shape and the random numbers.

    Attributes:
        method: How it learns.
        network: What learns.
        optimizer: How gradients become steps.
        rho: Trunk step scale.
        clip: Joint clipping bound.
    """

    method: TabularMethod
    network: Network
    optimizer: Adam
    rho: float = 1.0
    clip: float = 1.0

    def build(self, shape: TableShape, generator: torch.Generator) -> Learner:
        """The learner, on the generator's device.

        Raises:
            SplitError: The method cannot learn this.
        """
        from splitfg._split import Split
        from splitfg.learners import GradientLearner
        from splitfg.learners.hopfield import HopfieldReadout

        if isinstance(self.method, ForwardForwardMethod):
            return self._forward_forward(self.method, shape, generator)
        local = isinstance(self.method, PredictiveCodingMethod)
        make_trunk = self.network.plain_trunk if local else self.network.trunk
        trunk = make_trunk(shape.features, generator)
        if isinstance(self.method, HopfieldMethod):
            return HopfieldReadout(trunk, classes=shape.classes, capacity=self.method.capacity)
        split = Split(trunk, self.network.build_head(shape, generator))
        optimizer = self.optimizer.build(split, rho=self.rho)
        return GradientLearner(split, self.method.build(), optimizer, max_norm=self.clip)

    def _forward_forward(
        self, method: ForwardForwardMethod, shape: TableShape, generator: torch.Generator
    ) -> ForwardForward:
        import torch

        from splitfg.errors import SplitError
        from splitfg.learners.forward_forward import ForwardForward
        from splitfg.learners.goodness import Contrast, HardNegatives

        if shape.classes is None:
            raise SplitError(
                ["Forward-Forward compares labels, so it cannot learn a real value: choose another method"]
            )
        mlp = self.network.plain_trunk(shape.features + shape.classes, generator)
        settings = self.optimizer
        return ForwardForward(
            mlp,
            torch.optim.Adam(mlp.parameters(), lr=settings.lr, betas=settings.betas, eps=settings.eps),
            classes=shape.classes,
            label_scale=method.label_scale,
            objective=Contrast(method.sharpness),
            negatives=HardNegatives(method.negative_sharpness),
            max_norm=self.clip,
        )
