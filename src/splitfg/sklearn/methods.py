"""The methods a table can be learned with, as recipes that configs hold and runs record.

Nothing here imports torch until something is built.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from splitfg.recipes import (
    BackpropMethod,
    EvolutionMethod,
    FrozenMethod,
    MethodRecipe,
    PureFGMethod,
    SplitFGMethod,
)

if TYPE_CHECKING:
    from splitfg.estimators import Estimator


@dataclass(frozen=True)
class PredictiveCodingMethod(MethodRecipe):
    """Latents of a plain MLP settle, then its weights follow local errors."""

    settle_steps: int = 4
    settle_rate: float = 0.1
    stiffness: float = 10.0

    def build(self) -> tuple[Estimator, None]:
        """:class:`~splitfg.learners.predictive_coding.PredictiveCoding`."""
        from splitfg.learners.predictive_coding import PredictiveCoding

        return PredictiveCoding(self.settle_steps, self.settle_rate, self.stiffness), None


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


@dataclass(frozen=True)
class HopfieldMethod:
    """Softmax retrieval from stored examples over a frozen trunk; inverse temperature and scaling are chosen on them.

    Attributes:
        capacity: The most examples to store, a uniform sample of the training rows.
    """

    capacity: int = 20_000


TabularMethod: TypeAlias = (
    BackpropMethod
    | PureFGMethod
    | EvolutionMethod
    | ForwardForwardMethod
    | PredictiveCodingMethod
    | HopfieldMethod
    | SplitFGMethod
    | FrozenMethod
)


@dataclass(frozen=True)
class LinearHeadRecipe:
    """One linear layer, in closed form."""


@dataclass(frozen=True)
class NonlinearHeadRecipe:
    """A hidden ReLU layer of its own before the outputs, differentiated by reverse mode confined to the head."""

    width: int = 64


@dataclass(frozen=True)
class ProbedHeadRecipe:
    """One linear layer as a black box: measured by central differences, never differentiated."""


HeadRecipe: TypeAlias = LinearHeadRecipe | NonlinearHeadRecipe | ProbedHeadRecipe


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


METHODS: dict[str, TabularMethod] = {
    "split_fg": SplitFGMethod(K=8, chunk=2),
    "backprop": BackpropMethod(),
    "pure_fg": PureFGMethod(K=8, chunk=2),
    "es": EvolutionMethod(K=8),
    "forward_forward": ForwardForwardMethod(),
    "predictive_coding": PredictiveCodingMethod(),
    "hopfield": HopfieldMethod(),
    "frozen": FrozenMethod(),
}
"""The methods by name, with the paper's K = 8. Two tangents ride together: on a CPU a chunk then fits its cache."""
