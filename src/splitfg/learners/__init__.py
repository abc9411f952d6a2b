"""Learners: what training loops talk to. Gradient estimators come through :class:`GradientLearner`.

Methods that are not gradient estimators have a module each: ``forward_forward``, ``hopfield``, ``knn_lm`` and
``ngram``.
"""

from splitfg.learners.captured import CapturedLearner, DeviceBatches, DeviceStep
from splitfg.learners.gradient import GradientLearner

__all__ = ["CapturedLearner", "DeviceBatches", "DeviceStep", "GradientLearner"]
