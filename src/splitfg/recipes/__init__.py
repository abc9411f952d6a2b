"""Recipes: settings of methods and optimizers as frozen dataclasses, to store in configs and records.

``build()`` makes the estimator or optimizer. This package does not import torch before that. Recipes for tables are in
:mod:`splitfg.recipes.tables`.
"""

from splitfg.recipes._direct_path import (
    AnnealedMapsFeedback,
    AttentionMapsFeedback,
    DirectPathMethod,
    EveryNthFeedback,
    FeedbackRecipe,
    GatedMapsFeedback,
    IdentityFeedback,
    MeanJacobianFeedback,
    NoiseFeedback,
    ParallelPullMethod,
    RandomFeedback,
)
from splitfg.recipes._learned_feedback import AnchoredFeedbackMethod, LearnedFeedbackMethod, PredictedActivityMethod
from splitfg.recipes._local import ForwardForwardMethod, HopfieldMethod, PredictiveCodingMethod
from splitfg.recipes._map_rules import (
    AlignedRule,
    DeltaMapRule,
    FixedRule,
    ForwardDFARule,
    MapRuleRecipe,
    ProximalRule,
)
from splitfg.recipes._methods import (
    ActivityMethod,
    BackpropMethod,
    ConditionedLaw,
    EvolutionMethod,
    FrozenMethod,
    GaussianLaw,
    LawRecipe,
    MethodRecipe,
    OrthogonalLaw,
    PureFGMethod,
    RademacherLaw,
    SplitFGMethod,
    TableMethod,
)
from splitfg.recipes._optimizers import SGD, Adam, AdamL2, AdamW, LaggedRMS, Muon, OptimizerRecipe
from splitfg.recipes._probes import CoarseProbe, DerivativeProbe, DifferenceProbe, LayerProbe, ProbeRecipe
from splitfg.recipes._registry import PLUGINS, Recipe, recipes
from splitfg.recipes._routes import DirectRoute, EveryNthRoute, RelayRoute, RouteRecipe

__all__ = [
    "PLUGINS",
    "SGD",
    "ActivityMethod",
    "Adam",
    "AdamL2",
    "AdamW",
    "AlignedRule",
    "AnchoredFeedbackMethod",
    "AnnealedMapsFeedback",
    "AttentionMapsFeedback",
    "BackpropMethod",
    "CoarseProbe",
    "ConditionedLaw",
    "DeltaMapRule",
    "DerivativeProbe",
    "DifferenceProbe",
    "DirectPathMethod",
    "DirectRoute",
    "EveryNthFeedback",
    "EveryNthRoute",
    "EvolutionMethod",
    "FeedbackRecipe",
    "FixedRule",
    "ForwardDFARule",
    "ForwardForwardMethod",
    "FrozenMethod",
    "GatedMapsFeedback",
    "GaussianLaw",
    "HopfieldMethod",
    "IdentityFeedback",
    "LaggedRMS",
    "LawRecipe",
    "LayerProbe",
    "LearnedFeedbackMethod",
    "MapRuleRecipe",
    "MeanJacobianFeedback",
    "MethodRecipe",
    "Muon",
    "NoiseFeedback",
    "OptimizerRecipe",
    "OrthogonalLaw",
    "ParallelPullMethod",
    "PredictedActivityMethod",
    "PredictiveCodingMethod",
    "ProbeRecipe",
    "ProximalRule",
    "PureFGMethod",
    "RademacherLaw",
    "RandomFeedback",
    "Recipe",
    "RelayRoute",
    "RouteRecipe",
    "SplitFGMethod",
    "TableMethod",
    "recipes",
]
