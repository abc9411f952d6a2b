"""Recipes: methods and optimizers as data, which configs hold and runs record; those for tables in ``tables``.

Nothing here imports torch until something is built.
"""

from splitfg.recipes._direct_path import (
    DirectPathMethod,
    FeedbackRecipe,
    IdentityFeedback,
    MeanJacobianFeedback,
    RandomFeedback,
)
from splitfg.recipes._local import ForwardForwardMethod, HopfieldMethod, PredictiveCodingMethod
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
from splitfg.recipes._registry import PLUGINS, Recipe, recipes

__all__ = [
    "PLUGINS",
    "SGD",
    "ActivityMethod",
    "Adam",
    "AdamL2",
    "AdamW",
    "BackpropMethod",
    "ConditionedLaw",
    "DirectPathMethod",
    "EvolutionMethod",
    "FeedbackRecipe",
    "ForwardForwardMethod",
    "FrozenMethod",
    "GaussianLaw",
    "HopfieldMethod",
    "IdentityFeedback",
    "LaggedRMS",
    "LawRecipe",
    "MeanJacobianFeedback",
    "MethodRecipe",
    "Muon",
    "OptimizerRecipe",
    "OrthogonalLaw",
    "PredictiveCodingMethod",
    "PureFGMethod",
    "RademacherLaw",
    "RandomFeedback",
    "Recipe",
    "SplitFGMethod",
    "TableMethod",
    "recipes",
]
