"""Every public name of the package root; :mod:`splitfg` imports this module when the first of them is used."""

from splitfg.diagnosis import Diagnosis as Diagnosis, diagnose as diagnose
from splitfg.engines import (
    CentralDifference as CentralDifference,
    ForwardMode as ForwardMode,
    OneSidedDifference as OneSidedDifference,
)
from splitfg.errors import DataError as DataError, NonFiniteError as NonFiniteError, SplitError as SplitError
from splitfg.estimators import (
    ActivityFG as ActivityFG,
    Backprop as Backprop,
    CheckpointedBackprop as CheckpointedBackprop,
    DirectPath as DirectPath,
    Estimator as Estimator,
    EvolutionStrategy as EvolutionStrategy,
    ForwardGradient as ForwardGradient,
    FrozenTrunk as FrozenTrunk,
    LearnedFeedback as LearnedFeedback,
    Mean as Mean,
    ParallelPull as ParallelPull,
    PredictiveCoding as PredictiveCoding,
    Projection as Projection,
    SplitFG as SplitFG,
)
from splitfg.feedback import MeanJacobian as MeanJacobian
from splitfg.heads import (
    CrossEntropy as CrossEntropy,
    Head as Head,
    LinearHead as LinearHead,
    OutputLoss as OutputLoss,
    ProbedHead as ProbedHead,
    ReverseModeHead as ReverseModeHead,
    RowLoss as RowLoss,
    SquaredError as SquaredError,
)
from splitfg.learners import (
    CapturedLearner as CapturedLearner,
    GradientLearner as GradientLearner,
    LineSearch as LineSearch,
)
from splitfg.sites import (
    Activities as Activities,
    BlockPath as BlockPath,
    PathBlock as PathBlock,
    ResidualPath as ResidualPath,
)
from splitfg.splitting import (
    BlackBoxTrunk as BlackBoxTrunk,
    Role as Role,
    Split as Split,
    Tied as Tied,
    split as split,
)
from splitfg.tangents import (
    Conditioned as Conditioned,
    Gaussian as Gaussian,
    Orthogonal as Orthogonal,
    Rademacher as Rademacher,
    RunningMagnitude as RunningMagnitude,
    TangentLaw as TangentLaw,
)
from splitfg.training import (
    CosineWithWarmup as CosineWithWarmup,
    clip as clip,
    parameter_groups as parameter_groups,
    write_grads as write_grads,
)
from splitfg.types import (
    Engine as Engine,
    Estimate as Estimate,
    HeadGradient as HeadGradient,
    Learner as Learner,
    Params as Params,
    Stats as Stats,
    StepStats as StepStats,
)
