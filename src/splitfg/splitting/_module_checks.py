"""Validation of modules that need a special treatment: batch statistics, dropout, tables."""

from __future__ import annotations

from torch import Tensor, nn

from splitfg.errors import shorten
from splitfg.splitting._replace import labelled
from splitfg.splitting._split import Split
from splitfg.types import Target

_BATCH_STATISTICS = (nn.modules.batchnorm._BatchNorm,)
_RUNNING_STATISTICS = (nn.modules.instancenorm._InstanceNorm,)


def micro_batch_problems(split: Split, y: Target, micro_batch: int | None) -> list[str]:
    """List modules whose result depends on how a batch is divided."""
    if micro_batch is None or micro_batch >= y.shape[0]:
        return []
    names = [f"{name} ({type(m).__name__})" for name, m in split.trunk.named_modules() if _uses_batch(m)]
    words = "batch statistics of micro-batches are not those of the batch"
    cure = "pass micro_batch=None, call .eval() on it, or replace it by nn.GroupNorm"
    return [f"{shorten(names)}: {words}: {cure}"] if names else []


def _uses_batch(module: nn.Module) -> bool:
    return isinstance(module, _BATCH_STATISTICS) and (module.training or module.running_mean is None)


def mode_problems(part: nn.Module) -> list[str]:
    """List modules of a head, or of the trunk of an estimator without support for them, that need evaluation mode."""
    found = []
    for name, module in part.named_modules():
        if isinstance(module, _RUNNING_STATISTICS) and module.training and module.track_running_stats:
            found.append(
                f"{name} ({type(module).__name__}) updates its running statistics with every batch: call .eval() on it,"
                " or create it with track_running_stats=False"
            )
        if _uses_batch(module):
            found.append(
                f"{name} ({type(module).__name__}) uses batch statistics, which mix the samples of a batch: call"
                " .eval() on it, or replace it by nn.GroupNorm"
            )
        cure = _cure_of_randomness(module) if module.training else None
        if cure:
            found.append(
                f"{name} ({type(module).__name__}) is random in training mode, so that h and J·v would come from"
                f" different functions: call .eval() on it or {cure}"
            )
    return found


def _cure_of_randomness(module: nn.Module) -> str | None:
    """Return the cure for a torch module that is random in training mode, or ``None`` if it is deterministic."""
    if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
        return "set p=0"
    if isinstance(module, nn.MultiheadAttention) and module.dropout > 0:
        return "set dropout=0"
    if isinstance(module, nn.RNNBase) and module.dropout > 0 and module.num_layers > 1:
        return "set dropout=0"
    if isinstance(module, nn.RReLU) and module.lower < module.upper:
        return "use nn.LeakyReLU"
    return None


def table_problems(split: Split, tangents: bool) -> list[str]:
    """List tables whose backward rule is not the derivative of their forward, or that write to their own weight."""
    found = []
    for name, module in split.trunk.named_modules():
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        label = labelled(name, module)
        if module.max_norm is not None:
            found.append(f"{label} rescales its own rows in place: create it with max_norm=None")
        if tangents and module.scale_grad_by_freq and _is_perturbed(split, module.weight):
            found.append(
                f"{label} divides its gradient by the frequency of a row, which is not a derivative: create it with"
                " scale_grad_by_freq=False"
            )
    return found


def _is_perturbed(split: Split, p: Tensor) -> bool:
    perturbed = split.trunk_params()
    return any(p is other for name, other in split.model.named_parameters() if name in perturbed)
