"""Learners: what training loops talk to. Gradient estimators come through :class:`GradientLearner`."""

from splitfg.learners.gradient import GradientLearner

__all__ = ["GradientLearner"]
