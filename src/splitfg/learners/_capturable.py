"""Steps that a CUDA graph cannot hold."""

from __future__ import annotations

from splitfg.estimators import Estimator, ForwardGradient, MessagingEstimator, SplitFG
from splitfg.learners.gradient import GradientLearner


def capture_problems(learner: GradientLearner) -> list[str]:
    """List the reasons why a CUDA graph cannot hold the steps of a learner."""
    estimator, found = learner.estimator, []
    if learner.log is not None:
        found.append("a CUDA graph cannot call log")
    shares = isinstance(estimator, MessagingEstimator)
    if isinstance(estimator, MessagingEstimator) and not estimator.capturable:
        found.append("messages of gloo cannot be captured (use NCCL)")
    inner = getattr(estimator, "estimator", estimator) if shares else estimator
    return found + _tangent_problems(inner, shares)


def _tangent_problems(estimator: Estimator, shares: bool) -> list[str]:
    """List the problems of tangents.

    Args:
        estimator: The estimator.
        shares: Whether processes share the tangents, and draw those of earlier chunks again.
    """
    if not isinstance(estimator, SplitFG | ForwardGradient):
        return []
    if estimator.combine.looks_back:
        return [f"{type(estimator.combine).__name__} solves for its weights on the host (use Mean)"]
    chunk = estimator.engine.chunk
    if shares and not estimator.law.joint and chunk is not None and chunk < estimator.K:
        return ["a CUDA graph cannot set a generator back to draw chunks of tangents again (use chunk=None)"]
    return []
