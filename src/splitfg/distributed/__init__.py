"""Estimates on several processes and machines, with :mod:`torch.distributed`."""

from splitfg.distributed._connect import connect
from splitfg.distributed._estimator import DistributedEstimator
from splitfg.distributed._local_heads import LocalHeads
from splitfg.distributed._ranks import Ranks
from splitfg.distributed._replicas import check_replicas
from splitfg.distributed._score_log import ScoreLog
from splitfg.distributed._scores import gradient_from_scores, replay
from splitfg.distributed._sharded_head import ShardedHead
from splitfg.distributed._staged_pull import StagedPull
from splitfg.errors import LostRankError

__all__ = [
    "DistributedEstimator",
    "LocalHeads",
    "LostRankError",
    "Ranks",
    "ScoreLog",
    "ShardedHead",
    "StagedPull",
    "check_replicas",
    "connect",
    "gradient_from_scores",
    "replay",
]
