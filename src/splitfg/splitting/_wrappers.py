"""Validation that no module is wrapped for parallel training."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from torch import nn
from torch.nn.parallel import DistributedDataParallel

_NO_SUPPORT = "Several processes train it with splitfg.distributed.DistributedEstimator"
_FSDP = ("FullyShardedDataParallel", "FSDPModule")


def wrapper_problems(parts: Iterable[nn.Module]) -> list[str]:
    """List modules that synchronise or shard parameters in hooks on their forward or backward pass.

    Estimates bypass those hooks: the replicas of DistributedDataParallel would diverge, and the shards of FSDP are not
    the parameters that the model computes with.

    Returns:
        One problem for every kind of wrapper, with the name of the outermost module.
    """
    found: dict[str, str] = {}
    for part in parts:
        for name, module in part.named_modules():
            kind = _kind(module)
            if kind is not None and kind not in found:
                cure = "before fully sharding it" if kind in _FSDP else "wrapped.module"
                label = f"module {name!r}" if name else "the model"
                found[kind] = f"{label} is wrapped in {kind}: split the inner module, {cure}. {_NO_SUPPORT}"
    return list(found.values())


def _kind(module: nn.Module) -> str | None:
    """Return the class of a wrapper, or ``None`` for other modules."""
    if isinstance(module, DistributedDataParallel | nn.DataParallel):
        return type(module).__name__
    library = sys.modules.get("torch.distributed.fsdp")  # a module can be sharded only if the user imported it
    return next((name for name in _FSDP if library and isinstance(module, getattr(library, name, ()))), None)
