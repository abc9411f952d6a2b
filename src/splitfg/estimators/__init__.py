"""Estimators: ``estimator(split, x, y, generator=...) -> Estimate``, one method per file."""

from splitfg.estimators._combine import Combination, Mean, Projection
from splitfg.estimators._pull_pass import mean_rows, predicted_gradient, stream_rows
from splitfg.estimators.activity_fg import ActivityFG
from splitfg.estimators.anchored_feedback import AnchoredFeedback
from splitfg.estimators.backprop import Backprop, CheckpointedBackprop
from splitfg.estimators.direct_path import DirectPath
from splitfg.estimators.evolution import EvolutionStrategy
from splitfg.estimators.forward_gradient import ForwardGradient
from splitfg.estimators.frozen import FrozenTrunk
from splitfg.estimators.learned_feedback import FoundLayer, LearnedFeedback
from splitfg.estimators.parallel_pull import ParallelPull
from splitfg.estimators.partial import Partial, PartialEstimator, PartNeeds, SamplingEstimator, Share
from splitfg.estimators.predictive_coding import PredictiveCoding
from splitfg.estimators.protocol import (
    CompilableEstimator,
    Estimator,
    LearningEstimator,
    Measure,
    MessagingEstimator,
    SharingEstimator,
    Stateful,
    compiled,
)
from splitfg.estimators.split_fg import SplitFG

__all__ = [
    "ActivityFG",
    "AnchoredFeedback",
    "Backprop",
    "CheckpointedBackprop",
    "Combination",
    "CompilableEstimator",
    "DirectPath",
    "Estimator",
    "EvolutionStrategy",
    "ForwardGradient",
    "FoundLayer",
    "FrozenTrunk",
    "LearnedFeedback",
    "LearningEstimator",
    "Mean",
    "Measure",
    "MessagingEstimator",
    "ParallelPull",
    "PartNeeds",
    "Partial",
    "PartialEstimator",
    "PredictiveCoding",
    "Projection",
    "SamplingEstimator",
    "Share",
    "SharingEstimator",
    "SplitFG",
    "Stateful",
    "compiled",
    "mean_rows",
    "predicted_gradient",
    "stream_rows",
]
