"""Train neural networks without a backward pass through their trunk: split forward gradients.

Names are imported when they are first used, so that ``splitfg --help`` and ``splitfg ls`` need no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from splitfg._black_box import BlackBoxTrunk as BlackBoxTrunk
    from splitfg._diagnose import Diagnosis as Diagnosis
    from splitfg._diagnose import diagnose as diagnose
    from splitfg._split import Role as Role
    from splitfg._split import Split as Split
    from splitfg._split import Tied as Tied
    from splitfg._split import split as split
    from splitfg.engines import (
        CentralDifference as CentralDifference,
    )
    from splitfg.engines import (
        ForwardMode as ForwardMode,
    )
    from splitfg.engines import (
        OneSidedDifference as OneSidedDifference,
    )
    from splitfg.errors import NonFiniteError as NonFiniteError
    from splitfg.errors import SplitError as SplitError
    from splitfg.estimators import (
        ActivityFG as ActivityFG,
    )
    from splitfg.estimators import (
        Backprop as Backprop,
    )
    from splitfg.estimators import (
        CheckpointedBackprop as CheckpointedBackprop,
    )
    from splitfg.estimators import (
        DirectPath as DirectPath,
    )
    from splitfg.estimators import (
        Estimator as Estimator,
    )
    from splitfg.estimators import (
        EvolutionStrategy as EvolutionStrategy,
    )
    from splitfg.estimators import (
        ForwardGradient as ForwardGradient,
    )
    from splitfg.estimators import (
        FrozenTrunk as FrozenTrunk,
    )
    from splitfg.estimators import (
        Mean as Mean,
    )
    from splitfg.estimators import (
        Projection as Projection,
    )
    from splitfg.estimators import (
        SplitFG as SplitFG,
    )
    from splitfg.feedback import MeanJacobian as MeanJacobian
    from splitfg.heads import (
        CrossEntropy as CrossEntropy,
    )
    from splitfg.heads import (
        Head as Head,
    )
    from splitfg.heads import (
        LinearHead as LinearHead,
    )
    from splitfg.heads import (
        OutputLoss as OutputLoss,
    )
    from splitfg.heads import (
        ProbedHead as ProbedHead,
    )
    from splitfg.heads import (
        ReverseModeHead as ReverseModeHead,
    )
    from splitfg.heads import (
        SquaredError as SquaredError,
    )
    from splitfg.learners import CapturedLearner as CapturedLearner
    from splitfg.learners import GradientLearner as GradientLearner
    from splitfg.sites import Activities as Activities
    from splitfg.sites import ResidualPath as ResidualPath
    from splitfg.tangents import (
        Conditioned as Conditioned,
    )
    from splitfg.tangents import (
        Gaussian as Gaussian,
    )
    from splitfg.tangents import (
        Orthogonal as Orthogonal,
    )
    from splitfg.tangents import (
        Rademacher as Rademacher,
    )
    from splitfg.tangents import (
        RunningMagnitude as RunningMagnitude,
    )
    from splitfg.tangents import (
        TangentLaw as TangentLaw,
    )
    from splitfg.training import (
        CosineWithWarmup as CosineWithWarmup,
    )
    from splitfg.training import (
        clip as clip,
    )
    from splitfg.training import (
        parameter_groups as parameter_groups,
    )
    from splitfg.training import (
        write_grads as write_grads,
    )
    from splitfg.types import (
        Engine as Engine,
    )
    from splitfg.types import (
        Estimate as Estimate,
    )
    from splitfg.types import (
        HeadGradient as HeadGradient,
    )
    from splitfg.types import (
        Learner as Learner,
    )
    from splitfg.types import (
        Params as Params,
    )
    from splitfg.types import (
        Stats as Stats,
    )
    from splitfg.types import (
        StepStats as StepStats,
    )

__version__ = "0.1.0"

_HOMES = {
    "splitfg._black_box": ("BlackBoxTrunk",),
    "splitfg._diagnose": ("Diagnosis", "diagnose"),
    "splitfg._split": ("Role", "Split", "Tied", "split"),
    "splitfg.engines": ("CentralDifference", "ForwardMode", "OneSidedDifference"),
    "splitfg.errors": ("NonFiniteError", "SplitError"),
    "splitfg.estimators": (
        "ActivityFG",
        "Backprop",
        "CheckpointedBackprop",
        "DirectPath",
        "Estimator",
        "EvolutionStrategy",
        "ForwardGradient",
        "FrozenTrunk",
        "Mean",
        "Projection",
        "SplitFG",
    ),
    "splitfg.feedback": ("MeanJacobian",),
    "splitfg.heads": (
        "CrossEntropy",
        "Head",
        "LinearHead",
        "OutputLoss",
        "ProbedHead",
        "ReverseModeHead",
        "SquaredError",
    ),
    "splitfg.learners": ("CapturedLearner", "GradientLearner"),
    "splitfg.sites": ("Activities", "ResidualPath"),
    "splitfg.tangents": (
        "Conditioned",
        "Gaussian",
        "Orthogonal",
        "Rademacher",
        "RunningMagnitude",
        "TangentLaw",
    ),
    "splitfg.training": ("CosineWithWarmup", "clip", "parameter_groups", "write_grads"),
    "splitfg.types": ("Engine", "Estimate", "HeadGradient", "Learner", "Params", "Stats", "StepStats"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'splitfg' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
