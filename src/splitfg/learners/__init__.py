"""Learners: what training loops talk to. Gradient estimators come through :class:`GradientLearner`."""

from splitfg.learners.captured import CapturedLearner, DeviceBatches
from splitfg.learners.gradient import GradientLearner

__all__ = ["CapturedLearner", "DeviceBatches", "GradientLearner"]
