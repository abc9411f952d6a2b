"""Learners: what training loops talk to. Gradient estimators come through :class:`GradientLearner`.

The methods that are no gradient estimators have a module each: ``forward_forward``, ``predictive_coding`` (an
estimator with local rules), ``hopfield``, ``knn_lm`` and ``ngram``.
"""

from splitfg.learners.captured import CapturedLearner, DeviceBatches
from splitfg.learners.gradient import GradientLearner

__all__ = ["CapturedLearner", "DeviceBatches", "GradientLearner"]
