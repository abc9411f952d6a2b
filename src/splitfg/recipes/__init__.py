"""Recipes: methods and optimizers as data, which configs hold and runs record.

Nothing here imports torch until something is built.
"""

from splitfg.recipes._methods import (
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
)
from splitfg.recipes._optimizers import SGD, Adam, AdamW, LaggedRMS, Muon, OptimizerRecipe

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "BackpropMethod",
    "ConditionedLaw",
    "EvolutionMethod",
    "FrozenMethod",
    "GaussianLaw",
    "LaggedRMS",
    "LawRecipe",
    "MethodRecipe",
    "Muon",
    "OptimizerRecipe",
    "OrthogonalLaw",
    "PureFGMethod",
    "RademacherLaw",
    "SplitFGMethod",
]
