"""From an estimate to a training step: clipping, ``.grad``, parameter groups with rho, optimizers and schedules."""

from splitfg.training._epochs import Epochs
from splitfg.training._grads import clip, clip_, write_grads
from splitfg.training._groups import block_weights, check_rho, momentum, parameter_groups
from splitfg.training._lagged import LaggedRMSOptimizer
from splitfg.training._pair import OptimizerPair
from splitfg.training._schedule import Constant, CosineWithWarmup, Schedule
from splitfg.training._update import ScheduledOptimizer, Update

__all__ = [
    "Constant",
    "CosineWithWarmup",
    "Epochs",
    "LaggedRMSOptimizer",
    "OptimizerPair",
    "Schedule",
    "ScheduledOptimizer",
    "Update",
    "block_weights",
    "check_rho",
    "clip",
    "clip_",
    "momentum",
    "parameter_groups",
    "write_grads",
]
