"""Recipes of the direct path, the parallel pull and their feedback."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from splitfg.errors import SplitError, raise_if
from splitfg.recipes._methods import MethodRecipe
from splitfg.recipes._registry import Recipe
from splitfg.recipes.checks import below, not_positive

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
    """The gradient at the top of the stream, unchanged."""

    def build(self) -> Feedback:
        """Return :class:`~splitfg.feedback.UnchangedFeedback`."""
        from splitfg.feedback import UnchangedFeedback

        return UnchangedFeedback()


@dataclass(frozen=True)
class RandomFeedback(FeedbackRecipe):
    """The gradient at the top, through a fixed random matrix per writer.

    Attributes:
        seed: Seed of the matrices.
    """

    seed: int = 0

    def build(self) -> Feedback:
        """Return :class:`~splitfg.feedback.RandomMaps`."""
        from splitfg.feedback import RandomMaps

        return RandomMaps(self.seed)


@dataclass(frozen=True)
class NoiseFeedback(FeedbackRecipe):
    """Noise of the same size in place of the gradient at the top: a control without any signal."""

    def build(self) -> Feedback:
        """Return :class:`~splitfg.feedback.NoiseControl`."""
        from splitfg.feedback import NoiseControl

        return NoiseControl()


def _rate_problems(rate: float) -> list[str]:
    return [] if 0 < rate <= 1 else [f"rate must be in (0, 1], got {rate}"]


@dataclass(frozen=True)
class MeanJacobianFeedback(FeedbackRecipe):
    """The gradient at the top, through the mean Jacobian from each writer, learned with one JVP per step.

    Attributes:
        rate: Step size of the maps' updates, in (0, 1].
        limit: Largest unexplained response of a row, which shortens longer ones; none for no limit.
    """

    rate: float = 0.15
    limit: float | None = None

    def __post_init__(self) -> None:
        raise_if(_rate_problems(self.rate) + ([] if self.limit is None else not_positive(self, "limit")))

    def build(self) -> Feedback:
        """Return :class:`~splitfg.feedback.MeanJacobian`, whose maps the learner updates."""
        from splitfg.feedback import MeanJacobian

        return MeanJacobian(self.rate, limit=self.limit)


@dataclass(frozen=True)
class AnnealedMapsFeedback(FeedbackRecipe):
    """Mean-Jacobian maps whose rate falls with the learning rate.

    Attributes:
        steps: Measurements over which the rate falls.
        rate: Step size of the maps' updates at first, in (0, 1].
        last: Where it ends, as a share of ``rate``.
    """

    steps: int
    rate: float = 0.15
    last: float = 0.1

    def __post_init__(self) -> None:
        raise_if(below(1, self, "steps") + not_positive(self, "rate", "last"))

    def build(self) -> Feedback:
        """Return :class:`~splitfg.feedback.MeanJacobian`, whose maps the learner updates."""
        from splitfg.feedback import MeanJacobian

        return MeanJacobian(self.rate, steps=self.steps, last=self.last)


@dataclass(frozen=True)
class GatedMapsFeedback(FeedbackRecipe):
    """Mean-Jacobian maps with a correction for every cluster of the stream's value.

    Attributes:
        rate: Step size of the maps' updates, in (0, 1].
        clusters: Number of clusters.
    """

    rate: float = 0.15
    clusters: int = 16

    def __post_init__(self) -> None:
        raise_if(_rate_problems(self.rate) + below(2, self, "clusters"))

    def build(self) -> Feedback:
        """Return :class:`~splitfg.feedback.GatedMaps`."""
        from splitfg.feedback import GatedMaps

        return GatedMaps(self.rate, clusters=self.clusters)


@dataclass(frozen=True)
class AttentionMapsFeedback(FeedbackRecipe):
    """Mean-Jacobian maps that carry gradients back along attention weights.

    Attributes:
        rate: Step size of the maps' updates, in (0, 1].
    """

    rate: float = 0.15

    def __post_init__(self) -> None:
        raise_if(_rate_problems(self.rate))

    def build(self) -> Feedback:
        """Return :class:`~splitfg.feedback.AttentionMaps`."""
        from splitfg.feedback import AttentionMaps

        return AttentionMaps(self.rate)


@dataclass(frozen=True)
class EveryNthFeedback(FeedbackRecipe):
    """Learned maps that take their JVP at every n-th step only.

    Attributes:
        every: Steps from one measurement to the next.
        maps: The maps.

    Example:
        >>> from splitfg.recipes import DirectPathMethod, EveryNthFeedback
        >>> DirectPathMethod(EveryNthFeedback(4)).build().feedback.every
        4
    """

    every: int
    maps: FeedbackRecipe = field(default_factory=MeanJacobianFeedback)

    def __post_init__(self) -> None:
        raise_if(below(1, self, "every"))

    def build(self) -> Feedback:
        """Return the maps, which measure seldom."""
        from splitfg.feedback import LearnedMaps

        feedback = self.maps.build()
        if not isinstance(feedback, LearnedMaps):
            raise SplitError([f"{type(feedback).__name__} measures nothing: use maps=MeanJacobianFeedback()"])
        feedback.every = self.every
        return feedback


@dataclass(frozen=True)
class DirectPathMethod(MethodRecipe):
    """Exact head; u, carried along the residual stream, trains the layers that write to the stream.

    Attributes:
        feedback: Maps u to the gradient at each layer that writes to the stream.
        lean: Compute the head's gradients last, for less memory; the estimate is the same.
        tied_share: Factor of the trunk's share in the gradient of a tied table.
    """

    feedback: FeedbackRecipe = field(default_factory=IdentityFeedback)
    lean: bool = False
    tied_share: float = 1.0

    def build(self) -> Estimator:
        """Return :class:`~splitfg.DirectPath`, on the trunk's own ``residual_path()``."""
        from splitfg.estimators import DirectPath

        return DirectPath(feedback=self.feedback.build(), lean=self.lean, tied_share=self.tied_share)


@dataclass(frozen=True)
class ParallelPullMethod(MethodRecipe):
    """Exact head; every block of the trunk pulls a predicted gradient at its output back by itself.

    Attributes:
        feedback: Predicts the gradient at every block's output from u.
        pulls: Number of pulls of every block; as many pulls as blocks are backpropagation.
        own_block: Keep every pull inside its block.
        skips: Carry gradients along the skips of blocks such as those of a ResNet.
        group: Blocks in a group, inside which gradients pass from block to block.

    Example:
        >>> from splitfg.recipes import MeanJacobianFeedback, ParallelPullMethod
        >>> ParallelPullMethod(MeanJacobianFeedback(), pulls=2).build()
        ParallelPull(...)
    """

    feedback: FeedbackRecipe = field(default_factory=MeanJacobianFeedback)
    pulls: int = 1
    own_block: bool = False
    skips: bool = False
    group: int = 1

    def __post_init__(self) -> None:
        raise_if(below(1, self, "pulls", "group"))

    def build(self) -> Estimator:
        """Return :class:`~splitfg.ParallelPull`, on the trunk's own ``block_path()``."""
        from splitfg.estimators import ParallelPull

        return ParallelPull(
            feedback=self.feedback.build(),
            pulls=self.pulls,
            own_block=self.own_block,
            skips=self.skips,
            group=self.group,
        )
