"""Checks before an estimate with a divided head, whose messages need all processes at the same time."""

from __future__ import annotations

from collections.abc import Callable

import torch

from splitfg.distributed._ranks import Ranks
from splitfg.distributed._reduce import failed
from splitfg.distributed._sharded_head import CLOSED_FORM, ShardedHead
from splitfg.errors import SplitError
from splitfg.estimators import Estimator, EvolutionStrategy, ForwardGradient
from splitfg.splitting import Split
from splitfg.types import Target


def head_problems(split: Split, estimator: Estimator) -> list[str]:
    """List why an estimator cannot train a network with a divided head."""
    if not isinstance(split.head, ShardedHead) or not isinstance(estimator, ForwardGradient | EvolutionStrategy):
        return []
    return [f"{type(estimator).__name__} perturbs the head, which a ShardedHead divides: {CLOSED_FORM}"]


def meet_before_head(
    ranks: Ranks, head: ShardedHead, estimator: Estimator, y: Target, check: Callable[[], None]
) -> None:
    """Validate the rows of all processes before the first message of a divided head.

    Raises:
        SplitError: In all processes, if one has a bad batch, or they have different numbers of micro-batches.
    """
    error: Exception | None = None
    parts = 0
    try:
        check()
        parts = -(-len(y) // (getattr(estimator, "micro_batch", None) or len(y)))
    except Exception as problem:
        error = problem
    found = ranks.gather(torch.tensor([parts], device=ranks.device)).flatten().tolist()
    if 0 in found:
        raise failed(ranks, error)
    if len(set(found)) > 1:
        words = f"the rows of the processes make {found} micro-batches, and a ShardedHead needs the same number in all"
        raise SplitError([f"{words}: give every process as many rows, or leave micro_batch out"])
    head.expect(parts)
