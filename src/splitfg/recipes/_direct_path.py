"""The direct path as a recipe."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from splitfg.errors import raise_if
from splitfg.recipes._methods import MethodRecipe
from splitfg.recipes._registry import Recipe
from splitfg.recipes.checks import not_positive

if TYPE_CHECKING:
    from splitfg.estimators import Estimator
    from splitfg.feedback import Feedback


class FeedbackRecipe(Recipe):
    """Settings of a feedback; :meth:`build` makes it."""

    @abstractmethod
    def build(self) -> Feedback:
        """Return the feedback."""


@dataclass(frozen=True)
class IdentityFeedback(FeedbackRecipe):
    """r as it is."""

    def build(self) -> Feedback:
        """:class:`~splitfg.feedback.Identity`."""
        from splitfg.feedback import Identity

        return Identity()


@dataclass(frozen=True)
class RandomFeedback(FeedbackRecipe):
    """r through a fixed random matrix for every writer."""

    seed: int = 0

    def build(self) -> Feedback:
        """:class:`~splitfg.feedback.RandomMaps`."""
        from splitfg.feedback import RandomMaps

        return RandomMaps(self.seed)


@dataclass(frozen=True)
class MeanJacobianFeedback(FeedbackRecipe):
    """r through the mean Jacobian from every writer to the top, learned with one JVP a step."""

    rate: float = 0.15

    def __post_init__(self) -> None:
        raise_if(not_positive(self, "rate") or ([f"rate must be at most 1, got {self.rate}"] if self.rate > 1 else []))

    def build(self) -> Feedback:
        """:class:`~splitfg.feedback.MeanJacobian`, whose maps the learner updates."""
        from splitfg.feedback import MeanJacobian

        return MeanJacobian(self.rate)


@dataclass(frozen=True)
class DirectPathMethod(MethodRecipe):
    """Exact head; what the trunk writes to its residual stream is trained by u along that stream."""

    feedback: FeedbackRecipe = field(default_factory=IdentityFeedback)
    lean: bool = False

    def build(self) -> Estimator:
        """:class:`~splitfg.DirectPath`, on the trunk's own ``residual_path()``."""
        from splitfg.estimators import DirectPath

        return DirectPath(feedback=self.feedback.build(), lean=self.lean)
