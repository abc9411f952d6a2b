"""Learners: the interface of training loops. :class:`GradientLearner` makes one from any gradient estimator.

Methods that are not gradient estimators have one module each: ``forward_forward``, ``hopfield``, ``knn_lm`` and
``ngram``.
"""

from splitfg.learners.captured import CapturedLearner, DeviceBatches, DeviceStep
from splitfg.learners.gradient import GradientLearner
from splitfg.learners.line_search import LineSearch
from splitfg.learners.slopes import Slope, descents_along, slope_along, slopes_along

__all__ = [
    "CapturedLearner",
    "DeviceBatches",
    "DeviceStep",
    "GradientLearner",
    "LineSearch",
    "Slope",
    "descents_along",
    "slope_along",
    "slopes_along",
]
