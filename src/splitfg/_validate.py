"""Refusing early: everything that is wrong with a split and a batch, at once, with what to do about it."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.func import jvp
from torch.utils import _pytree as pytree

from splitfg._split import Split, disagreement
from splitfg.errors import NonFiniteError, SplitError, refuse
from splitfg.types import Inputs, Target

_BATCH_STATISTICS = (nn.modules.batchnorm._BatchNorm,)
_DROPOUT = (nn.modules.dropout._DropoutNd,)


def skip_checks() -> bool:
    """Whether values may not be looked at now, because a compiled or captured step is being made."""
    if torch.compiler.is_compiling():
        return True
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def check_batch(split: Split, x: Inputs, y: Target, generator: torch.Generator | None = None) -> None:
    """Refuse a batch that cannot work, before anything is computed; on failure h is looked at too.

    Raises:
        SplitError: With everything that is wrong.
    """
    if skip_checks():
        return
    found = batch_problems(split, x, y, generator)
    if found:
        raise SplitError(found + _problems_at_h(split, x, y))


def batch_problems(split: Split, x: Inputs, y: Target, generator: torch.Generator | None) -> list[str]:
    """What is wrong with the trunk's mode, the inputs, the target or the generator."""
    found = _mode_problems(split.trunk) + _tensor_problems(split, x, y)
    device = next(iter(split.trained_params().values())).device
    if generator is not None and generator.device.type != device.type:
        found.append(
            f"the generator is on {generator.device}, the parameters on {device}: use torch.Generator({device.type!r})"
        )
    if not found and not split.agrees_with_model(x):
        found.append(disagreement())
    return found


def check_h(split: Split, h: Tensor, y: Target) -> None:
    """Refuse an h or a target that does not fit the head, or an h that is not finite."""
    if skip_checks():
        return
    refuse(split.head.problems(h, y))
    _require_finite(h, "h")


def check_loss(loss: Tensor) -> None:
    """Refuse a loss that is not finite."""
    if not skip_checks():
        _require_finite(loss, "the loss")


def operator_problems(split: Split, x: Inputs) -> list[str]:
    """Every module of the trunk that uses an operator without a forward-mode rule, innermost modules only.

    Each module is run once with the inputs it gets, and then differentiated forward on its own.
    """
    found: dict[str, str] = {}
    for name, module, args in reversed(list(_calls(split, x))):
        inside = any(other.startswith(f"{name}.") or not name for other in found)
        problem = None if inside else _forward_mode_problem(module, args)
        if problem:
            found[name] = f"{name or 'the trunk'} ({type(module).__name__}): {problem}"
    return list(found.values())


def explain(error: Exception, split: Split, x: Inputs) -> SplitError | None:
    """What a failed forward-mode pass was about, if it can be told."""
    if "forward AD" not in str(error) and "vmap" not in str(error):
        return None
    found = operator_problems(split, x)
    return SplitError(found) if found else None


def _mode_problems(trunk: nn.Module) -> list[str]:
    found = []
    for name, module in trunk.named_modules():
        if isinstance(module, _BATCH_STATISTICS) and (module.training or module.running_mean is None):
            found.append(
                f"{name} ({type(module).__name__}) uses batch statistics, which are no function of the parameters"
                " alone: call .eval() on it, or replace it by nn.GroupNorm"
            )
        if isinstance(module, _DROPOUT) and module.training and module.p > 0:
            found.append(
                f"{name} ({type(module).__name__}) is random in training mode, so h and J·v would not belong"
                " together: call .eval() on it or set p=0"
            )
    return found


def _tensor_problems(split: Split, x: Inputs, y: Target) -> list[str]:
    found = []
    param = next(iter(split.trained_params().values()))
    tensors = [t for t in pytree.tree_leaves(x) if isinstance(t, Tensor)]
    if any(t.ndim == 0 or t.shape[0] == 0 for t in (*tensors, y)):
        found.append("the batch is empty: give at least one row")
    elif tensors and len({t.shape[0] for t in (*tensors, y)}) > 1:
        sizes = ", ".join(str(t.shape[0]) for t in (*tensors, y))
        found.append(f"inputs and target have different numbers of rows ({sizes}): they must match")
    strangers = {str(t.device) for t in (*tensors, y) if t.device != param.device}
    if strangers:
        found.append(f"the batch is on {', '.join(sorted(strangers))}, the parameters on {param.device}: move one")
    dtypes = {str(t.dtype) for t in tensors if t.is_floating_point() and t.dtype != param.dtype}
    if dtypes:
        found.append(f"inputs are {', '.join(sorted(dtypes))}, the parameters {param.dtype}: cast one of them")
    return found


def _problems_at_h(split: Split, x: Inputs, y: Target) -> list[str]:
    """What else is wrong, as far as can be told although other problems were found."""
    head = split.head
    try:
        return head.problems(split.h(x), y)
    except Exception:  # h cannot be computed: look at the target by itself
        width = head.out_features
        return [] if width is None else head.output_loss.problems(tuple(y.shape), width, y)


def _require_finite(value: Tensor, what: str) -> None:
    if not bool(torch.isfinite(value).all()):
        raise NonFiniteError(
            [f"{what} is not finite: check the inputs, or lower the learning rate or the trunk step scale rho"]
        )


def _calls(split: Split, x: Inputs) -> Iterator[tuple[str, nn.Module, tuple[Tensor, ...]]]:
    """Every call of a module of the trunk, in the order they begin: name, module, positional inputs."""
    seen: list[tuple[str, nn.Module, tuple[Tensor, ...]]] = []
    handles = [
        module.register_forward_pre_hook(lambda m, args, name=name: seen.append((name, m, args)))
        for name, module in split.trunk.named_modules()
    ]
    try:
        split.h(x)
    finally:
        for handle in handles:
            handle.remove()
    yield from seen


def _forward_mode_problem(module: nn.Module, args: tuple[Tensor, ...]) -> str | None:
    """Why this module cannot be differentiated forward, or None if it can."""
    params = {name: p.detach() for name, p in module.named_parameters()}
    floats = tuple(i for i, a in enumerate(args) if isinstance(a, Tensor) and a.is_floating_point())

    def run(params: dict[str, Tensor], *moving: Tensor) -> object:
        filled = list(args)
        for i, value in zip(floats, moving, strict=True):
            filled[i] = value
        return torch.func.functional_call(module, params, tuple(filled))

    primals = (params, *(args[i].detach() for i in floats))
    try:
        with torch.no_grad():
            jvp(run, primals, pytree.tree_map(torch.ones_like, primals))
    except (NotImplementedError, RuntimeError) as error:
        return _worded(str(error))
    return None


def _worded(message: str) -> str:
    operator = re.search(r"forward AD with (\S+) that does not support it", message)
    if operator is None:
        return f"cannot be differentiated forward ({message.splitlines()[0]})"
    advice = "write it with operators that have one, or use CentralDifference() as engine"
    if "attention" in operator[1]:
        advice = (
            "run it under torch.nn.attention.sdpa_kernel(SDPBackend.MATH), or write attention as matmul and softmax"
        )
    return f"the operator {operator[1]} has no forward-mode rule: {advice}"
