"""The methods beside the gradient methods as recipes: local rules and retrieval."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from splitfg.errors import refuse
from splitfg.recipes._checks import below, not_positive
from splitfg.recipes._methods import MethodRecipe

if TYPE_CHECKING:
    from splitfg.estimators import Estimator


@dataclass(frozen=True)
class PredictiveCodingMethod(MethodRecipe):
    """Latents of a plain MLP settle, then its weights follow local errors."""

    settle_steps: int = 4
    settle_rate: float = 0.1
    stiffness: float = 10.0

    def __post_init__(self) -> None:
        refuse(below(1, self, "settle_steps") + not_positive(self, "settle_rate", "stiffness"))

    def build(self) -> Estimator:
        """:class:`~splitfg.learners.predictive_coding.PredictiveCoding`."""
        from splitfg.learners.predictive_coding import PredictiveCoding

        return PredictiveCoding(self.settle_steps, self.settle_rate, self.stiffness)


@dataclass(frozen=True)
class ForwardForwardMethod:
    """Every layer of a plain MLP learns by itself to tell right labels from wrong ones; classification only.

    Attributes:
        label_scale: Size of the label's one-hot entry beside the features.
        sharpness: Of the paired objective log(1 + exp(-sharpness (g⁺ - g⁻))).
        negative_sharpness: How strongly wrong labels that look right are preferred as negatives.
    """

    label_scale: float = 3.0
    sharpness: float = 10.0
    negative_sharpness: float = 5.0

    def __post_init__(self) -> None:
        refuse(not_positive(self, "label_scale"))


@dataclass(frozen=True)
class HopfieldMethod:
    """Softmax retrieval from stored examples over a frozen trunk; inverse temperature and scaling are chosen on them.

    Attributes:
        capacity: The most examples to store, a uniform sample of the training rows.
    """

    capacity: int = 20_000

    def __post_init__(self) -> None:
        refuse(below(1, self, "capacity"))
