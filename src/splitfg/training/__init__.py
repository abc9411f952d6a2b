"""The step around an estimate: clipping, ``.grad``, parameter groups with rho, optimizers and schedules."""

from splitfg.training._grads import clip, write_grads
from splitfg.training._groups import momentum, parameter_groups
from splitfg.training._lagged import LaggedRMSOptimizer
from splitfg.training._optimizers import SGD, Adam, AdamW, LaggedRMS, Muon, OptimizerRecipe
from splitfg.training._schedule import Constant, CosineWithWarmup, Schedule

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Constant",
    "CosineWithWarmup",
    "LaggedRMS",
    "LaggedRMSOptimizer",
    "Muon",
    "OptimizerRecipe",
    "Schedule",
    "clip",
    "momentum",
    "parameter_groups",
    "write_grads",
]
