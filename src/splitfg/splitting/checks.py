"""Validation of a split and a batch before any computation: lists every problem with its cure."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from splitfg.errors import NonFiniteError, SplitError, raise_if
from splitfg.splitting._black_box import ForwardOnlyTrunk
from splitfg.splitting._restore import preserved
from splitfg.splitting._split import FIRST_BATCH, Split, require_split
from splitfg.types import Inputs, Target

_BATCH_STATISTICS = (nn.modules.batchnorm._BatchNorm,)
_RUNNING_STATISTICS = (nn.modules.instancenorm._InstanceNorm,)


def skip_checks() -> bool:
    """Whether a step is being compiled or captured, so that no code may depend on the values of tensors."""
    if torch.compiler.is_compiling():
        return True
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def has_rows(value: Any) -> bool:
    """Whether a value is a tensor, or an array for a black box, with a first dimension."""
    return len(getattr(value, "shape", ())) > 0


def check_batch(
    split: Split, x: Inputs, y: Target, generator: torch.Generator | None = None, *, tangents: bool = True
) -> None:
    """Validate a batch before any computation.

    The first batch of a split, and the first after modules have changed between training and evaluation mode, also
    validates that the trunk is a deterministic function of its parameters and that trunk and head compute the model's
    outputs.

    Args:
        split: The network.
        x: Inputs.
        y: Target.
        generator: Source of randomness, if the estimator draws.
        tangents: Whether the estimator perturbs the trunk's parameters.

    Raises:
        SplitError: Listing every problem.
    """
    require_split(split)
    if skip_checks():
        return
    found = _mode_problems(split) + _table_problems(split, tangents) + batch_problems(split, x, y, generator)
    if found:
        raise SplitError(found + _further_problems(split, x, y))
    split.validate_once(FIRST_BATCH, lambda: _first_use_problems(split, x))


def batch_problems(split: Split, x: Inputs, y: object, generator: object) -> list[str]:
    """List the problems of inputs, target and generator that show without running the network."""
    found = _tensor_problems(split, x, y)
    device = next(iter(split.trained_params().values())).device
    if not isinstance(generator, torch.Generator | None):
        found.append(f"the generator is {generator!r}: use torch.Generator({device.type!r}).manual_seed(0)")
    elif generator is not None and generator.device.type != device.type:
        found.append(
            f"the generator is on {generator.device}, the parameters on {device}: use torch.Generator({device.type!r})"
        )
    return found


def check_h(split: Split, h: Tensor, y: Target) -> None:
    """Validate h against the head and the target.

    Args:
        split: The network.
        h: Representation of the batch or of a part of it.
        y: Target of the whole batch.

    Raises:
        SplitError: If h does not fit the head or the target.
        NonFiniteError: If h is not finite.
    """
    if skip_checks():
        return
    raise_if(split.head.problems(h, y))
    _require_finite(h, "h")


def check_loss(loss: Tensor, scores: Tensor | None = None) -> None:
    """Raise :class:`NonFiniteError` if the loss or a score is not finite."""
    if not skip_checks():
        _require_finite(loss, "the loss")
        if scores is not None:
            _require_finite(scores, "a score <u, J v>")


def _mode_problems(split: Split) -> list[str]:
    found = []
    for name, module in (*split.trunk.named_modules(), *split.head.named_modules()):
        if isinstance(module, _RUNNING_STATISTICS) and module.training and module.track_running_stats:
            found.append(
                f"{name} ({type(module).__name__}) updates its running statistics with every batch: call .eval() on it,"
                " or create it with track_running_stats=False"
            )
        if isinstance(module, _BATCH_STATISTICS) and (module.training or module.running_mean is None):
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


def _table_problems(split: Split, tangents: bool) -> list[str]:
    """List tables whose backward rule is not the derivative of their forward, or that write to their own weight."""
    found = []
    for name, module in split.trunk.named_modules():
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        label = f"{name or 'the trunk'} ({type(module).__name__})"
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


def _tensor_problems(split: Split, x: Inputs, y: object) -> list[str]:
    if not isinstance(y, Tensor):
        return [f"the target is a {type(y).__name__}, not a tensor: use torch.as_tensor(target)"]
    found = []
    param = next(iter(split.trained_params().values()))
    arrays = [t for t in pytree.tree_leaves(x) if isinstance(t, Tensor) or has_rows(t)]
    tensors = [t for t in arrays if isinstance(t, Tensor)]
    if len(tensors) < len(arrays) and not isinstance(split.trunk, ForwardOnlyTrunk):
        found.append("the inputs contain an array instead of a tensor: use torch.as_tensor(x)")
    if any(len(t.shape) == 0 for t in (*arrays, y)):
        what = "the target" if y.ndim == 0 else "an input"
        found.append(f"{what} is a single number without rows: store constants in the trunk, as buffers")
    elif any(t.shape[0] == 0 for t in (*arrays, y)):
        found.append("the batch is empty: pass at least one row")
    elif arrays and len({t.shape[0] for t in (*arrays, y)}) > 1:
        sizes = ", ".join(str(t.shape[0]) for t in (*arrays, y))
        advice = "; store inputs without rows in the trunk, as buffers or in a closure" if len(arrays) > 1 else ""
        found.append(f"inputs and target have different numbers of rows ({sizes}): they must match{advice}")
    strangers = {str(t.device) for t in (*tensors, y) if t.device != param.device}
    if strangers:
        found.append(f"the batch is on {', '.join(sorted(strangers))}, the parameters on {param.device}: move one")
    held = {p.dtype for p in split.all_trunk_params().values()} or {param.dtype}
    dtypes = {str(t.dtype) for t in tensors if t.is_floating_point() and t.dtype not in held}
    if dtypes:
        listed = ", ".join(sorted(map(str, held)))
        found.append(f"inputs are {', '.join(sorted(dtypes))}, the parameters {listed}: cast one of them")
    return found


def _further_problems(split: Split, x: Inputs, y: object) -> list[str]:
    """List further problems of h and the target, as far as the problems found so far allow."""
    head = split.head
    if not isinstance(y, Tensor):
        return []
    # a forward pass would update running statistics
    moving = (*_BATCH_STATISTICS, *_RUNNING_STATISTICS)
    still = not any(isinstance(m, moving) and m.training for m in split.model.modules())
    try:
        if still:
            with preserved(split.trunk):
                return head.problems(split.h(x), y)
    except Exception:  # the problems already found may keep h from being computed
        pass
    return [] if head.out_features is None else head.output_loss.value_problems(head.out_features, y)


def _first_use_problems(split: Split, x: Inputs) -> list[str]:
    if isinstance(split.trunk, ForwardOnlyTrunk):
        return []  # hardware may be noisy, so that two runs differ
    copies = {name: p.detach().clone() for name, p in split.all_trunk_params().items()}
    try:
        h: object = split.trunk_function(x)(copies)
    except SplitError:
        raise
    except Exception:
        problem = split.disagreement(x)
        if problem is None:
            raise
        return [problem]
    written = [name for name, p in copies.items() if not p.is_inference() and p._version > 0]
    if written:
        return [f"the trunk writes to its parameters {', '.join(written)} in place: compute new tensors instead"]
    if not isinstance(h, Tensor):
        return [split.disagreement(x) or f"the trunk returns a {type(h).__name__}, not a tensor: return h alone"]
    if not torch.allclose(h, split.h(x), rtol=1e-4, atol=1e-6, equal_nan=True):
        return [
            "the trunk is random: it returns another h for the same inputs, so that h and J·v would come from different"
            " functions. Call .eval() (F.dropout(training=self.training) reads that flag), or remove the randomness"
        ]
    if next(split.head.buffers(), None) is not None:
        with suppress(Exception):  # check_h explains why h does not fit the head
            split.head.predict(h)  # shows which buffers the head writes to in place
    problem = split.disagreement(x)
    return [] if problem is None else [problem]


def _require_finite(value: Tensor, what: str) -> None:
    if not bool(torch.isfinite(value).all()):
        raise NonFiniteError(
            [f"{what} is not finite: check the inputs, or lower the learning rate or the trunk step scale rho"]
        )
