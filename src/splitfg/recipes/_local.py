"""Recipes of local learning rules and retrieval."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from splitfg.errors import SplitError, raise_if
from splitfg.recipes._methods import MethodRecipe, TableMethod
from splitfg.recipes.checks import below, not_positive

if TYPE_CHECKING:
    import torch

    from splitfg.estimators import Estimator
    from splitfg.recipes.tables import TableRecipe, TableShape
    from splitfg.types import Learner


@dataclass(frozen=True)
class PredictiveCodingMethod(MethodRecipe):
    """Predictive coding on a plain MLP: latents settle, then local errors train the weights.

    Attributes:
        settle_steps: Settling steps per batch; use at least the number of layers.
        settle_rate: Step size of the settling.
        stiffness: Precision of the latents relative to the output's.
        power_iterations: Iterations that measure the weights' norms to keep the settling stable; 0 leaves the step
            size as it is.
    """

    name: ClassVar[str] = "predictive_coding"
    plain_trunk: ClassVar[bool] = True

    settle_steps: int = 4
    settle_rate: float = 0.1
    stiffness: float = 10.0
    power_iterations: int = 0

    def __post_init__(self) -> None:
        found = below(1, self, "settle_steps") + below(0, self, "power_iterations")
        raise_if(found + not_positive(self, "settle_rate", "stiffness"))

    def build(self) -> Estimator:
        """Return :class:`~splitfg.PredictiveCoding`."""
        from splitfg.estimators import PredictiveCoding

        return PredictiveCoding(self.settle_steps, self.settle_rate, self.stiffness, self.power_iterations)


@dataclass(frozen=True)
class ForwardForwardMethod(TableMethod):
    """Forward-Forward: every layer of a plain MLP learns to tell right labels from wrong ones; classification only.

    Attributes:
        label_scale: Size of the label's one-hot entry among the inputs.
        sharpness: Sharpness of the paired objective log(1 + exp(-sharpness (g⁺ - g⁻))).
        negative_sharpness: Preference for likely confusions as negatives, the factor of their softmax.
    """

    name: ClassVar[str] = "forward_forward"

    label_scale: float = 3.0
    sharpness: float = 10.0
    negative_sharpness: float = 5.0

    def __post_init__(self) -> None:
        raise_if(not_positive(self, "label_scale"))

    def table_learner(self, recipe: TableRecipe, shape: TableShape, generator: torch.Generator) -> Learner:
        """Build :class:`~splitfg.learners.forward_forward.ForwardForward` on a plain MLP."""
        import torch

        from splitfg.learners.forward_forward import ForwardForward
        from splitfg.learners.goodness import Contrast, HardNegatives

        if shape.classes is None:
            raise SplitError(["Forward-Forward compares labels and cannot learn real values: choose another method"])
        mlp = recipe.network.plain_trunk(shape.features + shape.classes, generator)
        adam = recipe.optimizer
        return ForwardForward(
            mlp,
            torch.optim.Adam(mlp.parameters(), lr=adam.lr, betas=adam.betas, eps=adam.eps),
            classes=shape.classes,
            label_scale=self.label_scale,
            objective=Contrast(self.sharpness),
            negatives=HardNegatives(self.negative_sharpness),
            max_norm=recipe.clip,
        )


@dataclass(frozen=True)
class HopfieldMethod(TableMethod):
    """Softmax retrieval over a frozen trunk's features; chooses inverse temperature and scaling on stored examples.

    Attributes:
        capacity: Largest number of stored examples, a uniform sample of the training rows.
    """

    name: ClassVar[str] = "hopfield"

    capacity: int = 20_000

    def __post_init__(self) -> None:
        raise_if(below(1, self, "capacity"))

    def table_learner(self, recipe: TableRecipe, shape: TableShape, generator: torch.Generator) -> Learner:
        """Build :class:`~splitfg.learners.hopfield.HopfieldReadout` over an untrained trunk."""
        from splitfg.learners.hopfield import HopfieldReadout

        trunk = recipe.network.trunk(shape.features, generator)
        return HopfieldReadout(trunk, classes=shape.classes, capacity=self.capacity)
